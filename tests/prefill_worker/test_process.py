"""The worker as a process: it joins the cluster, serves, finds its home store, and leaves."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import pytest

from conductor.config import ConductorConfig
from conductor.service import serve as serve_conductor
from engine.config import load_model_config
from engine.pool_plan import plan_pool
from kvstore.config import StoreConfig
from kvstore.node import serve as serve_store
from prefill_worker.__main__ import main
from prefill_worker.config import PrefillConfig
from protocol.config import load
from protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, worker_pb2_grpc
from protocol.rpc import Channels
from protocol.wire import endpoint_from_wire, submission_to_wire
from tests.patience import PATIENCE_S, answered
from tests.ports import free_port
from tests.prefill_worker.builders import make_placement, make_request
from tests.prefill_worker.cluster import TOKEN, Ears, listening
from tests.prefill_worker.processes import process_of
from tests.prometheus import scrape
from tests.random_models import make_model
from tests.services import serving


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama", path)
    return path


async def until_member(
    channels: Channels, conductor: str, name: str, *, num_blocks: int = 0
) -> tuple[conductor_pb2.ClusterView, conductor_pb2.InstanceView]:
    stub = conductor_pb2_grpc.ConductorStub(channels.to(conductor))

    async def ask() -> tuple[conductor_pb2.ClusterView, conductor_pb2.InstanceView] | None:
        request = conductor_pb2.GetClusterRequest()
        view = await channels.call(stub.GetCluster, request, timeout_s=PATIENCE_S)
        named = (i for i in view.instances if i.endpoint.instance_id == name)
        return next(((view, i) for i in named if i.indexed_blocks >= num_blocks), None)

    return await answered(ask)


async def test_a_process_joins_serves_stores_and_leaves(model_path: Path) -> None:
    channels = Channels(TOKEN)
    conductor_config = ConductorConfig(cluster_token=TOKEN)
    async with serving(serve_conductor, conductor_config) as facts:
        conductor = facts["rpc"]
        store_config = StoreConfig(
            instance_id="store-0", cluster_token=TOKEN, conductor=conductor, dram=4 * 2**20
        )
        flags = {
            "--instance-id": "prefill-0",
            "--model": str(model_path),
            "--dtype": "float32",
            "--block-size": "8",
            "--kv-cache-memory": "1MiB",
            "--conductor": conductor,
            "--home-store": "store-0",
            "--metrics-port": str(metrics_port := free_port()),
        }
        async with (
            serving(serve_store, store_config),
            process_of("prefill_worker", *(part for pair in flags.items() for part in pair)) as (
                process,
                rpc,
            ),
        ):
            view, member = await until_member(channels, conductor, "prefill-0")
            assert member.role == common_pb2.ROLE_PREFILL
            assert member.endpoint.rpc_address == rpc
            assert view.max_model_len == 1024

            request = make_request(
                "r", range(20), max_tokens=1, block_size=8, fingerprint=view.fingerprint
            )
            ears, stub = Ears(), worker_pb2_grpc.WorkerStub(channels.to(rpc))
            async with listening(ears, channels, endpoint_from_wire(member.endpoint)):
                message = submission_to_wire(request, make_placement(request))
                await channels.call(stub.Submit, message, timeout_s=PATIENCE_S)
                await ears.all_tokens("r")

            # Two full blocks, computed here and put into the store that the conductor knows.
            await until_member(channels, conductor, "prefill-0", num_blocks=2)
            await until_member(channels, conductor, "store-0", num_blocks=2)
            metrics = await asyncio.to_thread(scrape, metrics_port)
            assert re.search(r'transfer_bytes_total\{op="write",peer="store-0",.* [1-9]', metrics)

            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
            view, _ = await until_member(channels, conductor, "store-0")
            assert [i.endpoint.instance_id for i in view.instances] == ["store-0"]
        await channels.close()


def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--instance-id", "p", "--model", "x", "--block-sise", "8"]) == 2
    assert "did you mean --block-size?" in capsys.readouterr().err
    assert main(["--instance-id", "p", "--model", "x", "--home-store", "store-0"]) == 2
    assert "--home-store needs --conductor" in capsys.readouterr().err


def test_without_chunked_prefill_a_step_takes_the_longest_prompt(model_path: Path) -> None:
    arguments = ["--instance-id", "p", "--model", str(model_path), "--no-enable-chunked-prefill"]
    config = load(PrefillConfig, arguments, prog="prefill_worker", environ={})
    plan = plan_pool(config, load_model_config(model_path))
    assert config.limits(plan).max_num_batched_tokens == plan.max_model_len == 1024
