"""Workers of both roles join a cluster, find their home store, serve, drain and leave."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moonserve.conductor.config import ConductorConfig
from moonserve.conductor.service import serve as serve_conductor
from moonserve.decode_worker.config import DecodeConfig
from moonserve.decode_worker.worker import serve as serve_decode
from moonserve.deploy.launcher.ports import free_port
from moonserve.engine.kv_cache.pool_size import plan_pool
from moonserve.engine.model.config import load_model_config
from moonserve.kvstore.config import StoreConfig
from moonserve.kvstore.node.process import serve as serve_store
from moonserve.prefill_worker.config import PrefillConfig
from moonserve.prefill_worker.worker import serve as serve_prefill
from moonserve.protocol.errors import ConfigError, NoWorker
from moonserve.protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, worker_pb2, worker_pb2_grpc
from moonserve.protocol.process.config import load_config
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import endpoint_from_wire
from tests.decode_worker.world import hold_steps
from tests.patience import PATIENCE_S, answered
from tests.prefill_worker.builders import make_request
from tests.prometheus import scrape
from tests.services import ReportedLifecycle, serving
from tests.worker.parts import BLOCK_SIZE, TOKEN, Ears, listening, submit


@dataclass
class Cluster:
    """A conductor, a store and a worker of each role, all in the test's own process."""

    conductor: str
    channels: Channels = field(default_factory=lambda: Channels(TOKEN))
    ears: Ears = field(default_factory=Ears)
    metrics_port: int = field(default_factory=free_port)
    lifecycles: dict[str, ReportedLifecycle] = field(default_factory=dict)

    async def member(self, name: str, num_blocks: int = 0) -> conductor_pb2.InstanceView:
        """Returns the conductor's view of an instance, once it has indexed at least `num_blocks` blocks."""
        return await answered(lambda: self._find(name, num_blocks))

    async def _find(self, name: str, num_blocks: int) -> conductor_pb2.InstanceView | None:
        named = (each for each in (await self.view()).instances if each.endpoint.instance_id == name)
        return next((each for each in named if each.indexed_blocks >= num_blocks), None)

    async def view(self) -> conductor_pb2.ClusterView:
        stub = conductor_pb2_grpc.ConductorStub(self.channels.to(self.conductor))
        return await self.channels.call(stub.GetCluster, conductor_pb2.GetClusterRequest(), timeout_s=PATIENCE_S)

    async def submit(self, name: str, first: int, max_tokens: int) -> None:
        """Submits a prompt of 20 tokens, beginning with `first`."""
        prefill, decode = [
            endpoint_from_wire((await self.member(worker)).endpoint) for worker in ("prefill-0", "decode-0")
        ]
        request = make_request(
            name,
            range(first, first + 20),
            max_tokens=max_tokens,
            block_size=BLOCK_SIZE,
            fingerprint=(await self.view()).fingerprint,
        )
        await submit(self.channels, request, prefill, decode)

    async def set_draining(self, name: str, draining: bool) -> None:
        address = (await self.member(name)).endpoint.rpc_address
        stub = worker_pb2_grpc.DrainingStub(self.channels.to(address))
        request = worker_pb2.SetDrainingRequest(draining=draining)
        await self.channels.call(stub.SetDraining, request, timeout_s=PATIENCE_S)

    @asynccontextmanager
    async def running(
        self, serve: Callable[[Any, Any], Awaitable[None]], config: DecodeConfig | PrefillConfig
    ) -> AsyncIterator[None]:
        """Runs a worker with a gateway's event listener. The worker stops when the block ends, or before."""
        lifecycle = self.lifecycles[config.instance_id] = ReportedLifecycle()
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(serve(config, lifecycle))  # type: ignore[arg-type]
            await asyncio.wait_for(lifecycle.facts, PATIENCE_S)
            endpoint = endpoint_from_wire((await self.member(config.instance_id)).endpoint)
            async with listening(self.ears, self.channels, endpoint):
                yield
                lifecycle.stopping.set()
                await asyncio.wait_for(asyncio.shield(working), PATIENCE_S)


def options(model: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "dtype": "float32",
        "cluster_token": TOKEN,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory": 1 << 20,
        **changes,
    }


@asynccontextmanager
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    async with serving(serve_conductor, ConductorConfig(cluster_token=TOKEN)) as facts:
        made = Cluster(facts["rpc"])
        common = options(model, conductor=made.conductor, home_store="store-0")
        store = StoreConfig(instance_id="store-0", cluster_token=TOKEN, conductor=made.conductor, dram=4 * 2**20)
        prefill = PrefillConfig(instance_id="prefill-0", metrics_port=made.metrics_port, **common)
        decode = DecodeConfig(instance_id="decode-0", **common)
        async with serving(serve_store, store):
            async with made.running(serve_prefill, prefill), made.running(serve_decode, decode):
                yield made
            left = [each.endpoint.instance_id for each in (await made.view()).instances]
            assert left == ["store-0"], "workers leave"
        await made.channels.close()


async def test_workers_join_serve_store_and_leave(model_path: Path) -> None:
    async with cluster(model_path) as c:
        prefill, decode = await c.member("prefill-0"), await c.member("decode-0")
        assert (prefill.role, decode.role) == (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE)
        assert (await c.view()).max_model_len == 1024
        assert "measuring" in c.lifecycles["prefill-0"].stages
        await c.submit("r", 0, 6)
        assert len(await c.ears.all_tokens("r")) == 6
        # The full blocks. The prefill worker puts the prompt's into the home store, the decode worker the answer's.
        for name, num_blocks in (("prefill-0", 2), ("decode-0", 3), ("store-0", 3)):
            await c.member(name, num_blocks)
        metrics = await asyncio.to_thread(scrape, c.metrics_port)
        assert re.search(r'transfer_bytes_total\{op="write",peer="store-0",.* [1-9]', metrics)
        assert "moonserve_transfer_segments 1.0" in metrics


async def test_draining_worker_refuses_new_requests_and_finishes_old_ones(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds for a prefill worker that is drained by command and resumed, and for a decode worker that is stopped."""
    steps = hold_steps(monkeypatch)
    monkeypatch.setattr("moonserve.worker.process.STOP_GRACE_S", PATIENCE_S)  # time to send the last token
    async with cluster(model_path) as c:
        await c.set_draining("prefill-0", True)
        with pytest.raises(NoWorker):
            await c.submit("refused", 0, 6)
        await c.set_draining("prefill-0", False)
        await c.submit("old", 0, 6)
        await c.ears.first_token("old")
        c.lifecycles["decode-0"].stopping.set()
        await answered(lambda: c.member("decode-0"), lambda member: member.draining)
        await c.submit("new", 100, 6)
        assert (await c.ears.failure("new")).code == NoWorker.code
        for _ in range(5):
            steps.release()
        assert len(await c.ears.all_tokens("old")) == 6


async def test_missing_model_is_named_in_the_error() -> None:
    config = DecodeConfig(instance_id="d", **options(Path("/does/not/exist")))
    with pytest.raises(ConfigError, match="/does/not/exist"):
        await serve_decode(config, ReportedLifecycle())


def test_a_batch_must_hold_a_token_of_each_sequence(model_path: Path) -> None:
    wrong = options(model_path, max_num_seqs=8, max_num_batched_tokens=4)
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 4"):
        DecodeConfig(instance_id="d", **wrong)


def test_without_chunked_prefill_a_step_takes_the_longest_prompt(model_path: Path) -> None:
    arguments = ["--instance-id", "p", "--model", str(model_path), "--no-enable-chunked-prefill"]
    config = load_config(PrefillConfig, arguments, prog="prefill_worker", environ={})
    plan = plan_pool(config, load_model_config(model_path))
    assert config.limits(plan).max_num_batched_tokens == plan.max_model_len == 1024
