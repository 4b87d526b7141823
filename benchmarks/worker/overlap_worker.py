"""A prefill worker for the overlap benchmark, and the processes of its store and of its handoff's target.

The target is a process with the memory into which a decode worker would receive a handoff, and nothing else. The worker
hands KV off to it over shm, as to a decode worker on the same host.
`python -m benchmarks.worker.overlap_worker TOKEN BYTES` prints the target of writes and runs until its standard input
ends.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.worker.timeline import PrefillTimeline, RecordedEngine, RecordedStores, RecordedTransfer
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.replica import Replica
from moonserve.prefill_worker.config import PrefillConfig
from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.decisions.events import CommitHandoff, ReserveLanding
from moonserve.prefill_worker.decode_client import DecodeClient
from moonserve.prefill_worker.service import PrefillService
from moonserve.prefill_worker.state import PrefillState
from moonserve.protocol.kv_blocks import block_keys, root_key
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.process.child_process import wait_until_ready
from moonserve.protocol.process.machine import host_identity
from moonserve.protocol.request import (
    Endpoint,
    GatewayId,
    LeaseId,
    Placement,
    PrefixSource,
    Request,
    RequestId,
    SamplingParams,
)
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.transfer import Segment, TransferEngine
from moonserve.worker.events import Submitted
from moonserve.worker.process import KvMemory


@dataclass(frozen=True, slots=True)
class HandoffSink:
    """Target of handoffs: a window of a segment in another process."""

    address: str
    segment_id: int
    window_id: int
    num_blocks: int


class SinkLandings(DecodeClient):
    """Landing client that grants every reservation in the sink, one at a time, and accepts every commit."""

    def __init__(self, channels: Channels, sink: HandoffSink) -> None:
        super().__init__(channels, fingerprint="", ttl_s=600.0)
        self._sink = sink

    async def reserve(self, action: ReserveLanding) -> ev.Landing:
        return ev.Landing(
            lease_id=action.lease_id,
            block_ids=tuple(range(self._sink.num_blocks)),
            num_cached_blocks=0,
            transfer_address=self._sink.address,
            segment_id=self._sink.segment_id,
            window_id=self._sink.window_id,
            num_blocks=self._sink.num_blocks,
            ttl_s=600.0,
        )

    async def renew(self, decode: Endpoint, lease_id: LeaseId) -> None: ...

    async def commit(self, action: CommitHandoff) -> tuple[int, ...]:
        return ()

    async def release(self, decode: Endpoint, lease_id: LeaseId) -> None: ...


def serve_sink(token: str, nbytes: int) -> None:
    with TransferEngine(cluster_token=token) as transfer:
        segment = transfer.allocate(nbytes)
        window_id = transfer.open_window(segment, [(0, nbytes)])
        print(json.dumps([transfer.address, segment.segment_id, window_id]), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    serve_sink(sys.argv[1], int(sys.argv[2]))


TOKEN = "benchmark"
_GATEWAY = GatewayId("benchmark")
_STORE = "store"
_GREEDY = SamplingParams(max_tokens=2, temperature=0.0)  # more than one token, so that there is a handoff


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRun:
    """Result of one prompt."""

    ttft_s: float
    token_id: int
    record: PrefillTimeline


class LoadMode:
    """One way to get a prompt's KV: a prefill service with its own state."""

    def __init__(self, state: PrefillState, service: PrefillService) -> None:
        self.state = state
        self.service = service
        self.tokens: asyncio.Queue[int] = asyncio.Queue()
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for batch in self.service.streams.events(_GATEWAY):
            for failed in batch.failures:
                raise RuntimeError(failed.failure.message)
            for token in batch.tokens:
                self.tokens.put_nowait(token.token_id)

    async def close(self) -> None:
        self._listening.cancel()
        await asyncio.wait([self._listening])
        await self.service.stop()


class Worker:
    """The product's prefill service over one replica. All ways share the engine and memory, and take turns."""

    def __init__(
        self,
        replica: Replica,
        segment: Segment,
        transfer: RecordedTransfer,
        prompt: Sequence[int],
        sink: HandoffSink,
    ) -> None:
        self._replica = replica
        self._memory = KvMemory(segment, replica.plan.layout, replica.plan.num_blocks)
        self._transfer = transfer
        self._channels = Channels(TOKEN)
        self._record = PrefillTimeline()
        self._engine: Any = RecordedEngine(replica.thread, self._record)
        self._prompt = tuple(prompt)
        root = root_key(replica.fingerprint)
        self._keys = tuple(block_keys(root, prompt, replica.config.block_size))
        self._num_requests = 0
        self._landings = SinkLandings(self._channels, sink)
        transfer.record = self._record
        self.stores = RecordedStores(self._channels, transfer, self._record)

    @asynccontextmanager
    async def load_mode(self, layered_loads: str, *, writes: bool = False) -> AsyncIterator[LoadMode]:
        """Starts a service. `writes`: computed blocks are put into the store; otherwise prompts leave no blocks."""
        replica, config = self._replica, self._replica.config
        assert isinstance(config, PrefillConfig)
        profile, _ = replica.step_costs
        pool = BlockPool(
            replica.plan.num_blocks,
            on_added=lambda _key, _parent: None,
            on_removed=lambda key: state.on_evicted(key),
            enable_prefix_caching=writes,
        )
        state = PrefillState(
            pool,
            replace(config.limits(replica.plan), layered_loads=layered_loads),
            lease_prefix=f"way-{self._num_requests}",
            profile=profile,
            home_store=_STORE if writes else None,
        )
        service = PrefillService(
            state,
            engine=self._engine,
            memory=self._memory,
            transfer=self._transfer,
            landings=self._landings,
            stores=self.stores,
            landing_ttl_s=30.0,
        )
        way = LoadMode(state, service)
        try:
            yield way
        finally:
            await way.close()

    async def fill(self, address: str) -> Endpoint:
        """Writes the prompt's blocks to the store at `address`; returns its endpoint."""
        store = replace(await self.stores.locate(address), instance_id=_STORE)
        async with self.load_mode("never", writes=True) as way:
            way.service.home_found(store)
            await self.prefill(way)
            asked = kvstore_pb2.StoreExistsRequest(keys=self._keys)
            while not all((await self.stores.call(store, "Exists", asked)).present):  # noqa: ASYNC110 - polls it
                await asyncio.sleep(0.05)
        return store

    async def prefill(self, way: LoadMode, source: PrefixSource | None = None) -> PrefillRun:
        """Computes the prompt. `source`: a store that has a prefix of it."""
        self._num_requests += 1
        request = Request(
            request_id=RequestId(f"r{self._num_requests}"),
            gateway_id=_GATEWAY,
            token_ids=self._prompt,
            num_prompt_tokens=len(self._prompt),
            block_keys=self._keys,
            sampling=_GREEDY,
        )
        here = Endpoint(instance_id="here", epoch=1, rpc_address="", transfer_address="", host=host_identity())
        placement = Placement(
            request_id=request.request_id,
            prefill=here,
            decode=here,
            prefix_sources=(source,) if source is not None else (),
        )
        self._record.clear()
        began_at = time.perf_counter()
        way.service.post(Submitted(request=request, placement=placement))
        token_id = await way.tokens.get()
        ttft_s = time.perf_counter() - began_at
        await way.service.drained()
        return PrefillRun(ttft_s=ttft_s, token_id=token_id, record=self._record.since(began_at))

    async def close(self) -> None:
        await self.stores.close()
        await self._channels.close()


@asynccontextmanager
async def sink_process(nbytes: int, num_blocks: int) -> AsyncIterator[HandoffSink]:
    """Starts the process that receives the handoff in place of a decode worker."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.worker.overlap_worker", TOKEN, str(nbytes)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address, segment_id, window_id = json.loads(await process.stdout.readline())
        yield HandoffSink(address, segment_id, window_id, num_blocks)
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def store_process(transports: str, nbytes: int) -> AsyncIterator[str]:
    """Starts a store node; yields its RPC address."""
    reading, writing = os.pipe()
    flags: Mapping[str, str] = {
        "--instance-id": _STORE,
        "--dram": str(nbytes),
        "--transports": transports,
        "--status-fd": str(writing),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "moonserve",
        "store",
        *(word for flag in flags.items() for word in flag),
        env={**os.environ, "MOONSERVE_CLUSTER_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
        pass_fds=[writing],
    )
    os.close(writing)
    try:
        yield (await wait_until_ready(reading))["rpc"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
