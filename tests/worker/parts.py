"""Parts of an in-process cluster with real sockets and a tiny model: a decode worker and a gateway's event listener."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moonserve.decode_worker.decisions.limits_and_counters import Limits
from moonserve.decode_worker.decisions.offloading import OffloadCosts
from moonserve.decode_worker.service import DecodeService, LandingServicer, LandingZone
from moonserve.decode_worker.state import DecodeState
from moonserve.engine.engine import Engine, EngineThread, staging_of
from moonserve.engine.model.config import load_model_config
from moonserve.kvstore.client.blocks import BlockStores
from moonserve.protocol.kv_blocks import KvLayout
from moonserve.protocol.pb import common_pb2, worker_pb2, worker_pb2_grpc
from moonserve.protocol.process.machine import host_identity
from moonserve.protocol.request import Endpoint, Placement, PrefixSource, Request
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from moonserve.protocol.rpc.wire import submission_to_wire
from moonserve.transfer import TransferEngine
from moonserve.worker.process import KvMemory
from moonserve.worker.service import WorkerServicer
from tests.engine import steps
from tests.engine.kernels.calls import kernels_folder
from tests.engine.kv_cache.shapes import quiet_pool
from tests.engine.tensor_parallel.threaded_ranks import threaded_ranks
from tests.patience import PATIENCE_S

TOKEN = "secret"
BLOCK_SIZE = 8


@dataclass
class Ears:
    """Event listener of a gateway. Records the events of all workers."""

    tokens: dict[str, dict[int, int]] = field(default_factory=dict)
    reports: dict[str, worker_pb2.PrefillReport] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    failures: dict[str, common_pb2.Failure] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def listen(self, channels: Channels, address: str, stands: asyncio.Event) -> None:
        stub = worker_pb2_grpc.WorkerStub(channels.to(address))
        request = worker_pb2.EventsRequest(gateway_id="gateway-0")
        async for batch in channels.stream(stub.Events, request):
            stands.set()
            async with self.changed:
                self._take(batch)
                self.changed.notify_all()

    def _take(self, batch: worker_pb2.EventBatch) -> None:
        for event in batch.tokens:
            tokens = self.tokens.setdefault(event.request_id, {})
            assert event.index not in tokens, "a token came twice"
            tokens[event.index] = event.token_id
            if event.finish_reason:
                self.finished.add(event.request_id)
        self.reports.update({report.request_id: report for report in batch.prefills})
        self.failures.update({failed.request_id: failed.failure for failed in batch.failures})

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(holds)

    async def all_tokens(self, name: str) -> list[int]:
        """Returns all tokens of a request once it has finished. Fails if the request failed or tokens are missing."""
        await self.until(lambda: name in self.finished or name in self.failures)
        assert name not in self.failures, self.failures[name]
        indexes = sorted(self.tokens[name])
        assert indexes == list(range(indexes[0], indexes[0] + len(indexes))), "some are missing"
        return [self.tokens[name][index] for index in indexes]

    async def first_token(self, name: str) -> int:
        await self.until(lambda: bool(self.tokens.get(name)))
        return self.tokens[name][0]

    async def failure(self, name: str) -> common_pb2.Failure:
        await self.until(lambda: name in self.failures)
        return self.failures[name]


@asynccontextmanager
async def listening(ears: Ears, channels: Channels, endpoint: Endpoint) -> AsyncIterator[None]:
    """Listens to a worker during the block. Workers fail the requests of a gateway that is disconnected for seconds."""
    stands = asyncio.Event()
    task = asyncio.create_task(ears.listen(channels, endpoint.rpc_address, stands))
    try:
        await asyncio.wait_for(stands.wait(), PATIENCE_S)
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def submit(
    channels: Channels, request: Request, prefill: Endpoint, decode: Endpoint, sources: Sequence[PrefixSource] = ()
) -> None:
    """Submits a placed request to its prefill worker, as a gateway does."""
    placement = Placement(request_id=request.request_id, prefill=prefill, decode=decode, prefix_sources=tuple(sources))
    stub = worker_pb2_grpc.WorkerStub(channels.to(prefill.rpc_address))
    message = submission_to_wire(request, placement)
    await channels.call(stub.Submit, message, timeout_s=PATIENCE_S)


async def status_of(channels: Channels, worker: Endpoint) -> worker_pb2.WorkerStatus:
    stub = worker_pb2_grpc.WorkerStub(channels.to(worker.rpc_address))
    return await channels.call(stub.GetStatus, worker_pb2.GetStatusRequest(), timeout_s=PATIENCE_S)


def endpoint_of(name: str, rpc_address: str, transfer_address: str = "") -> Endpoint:
    return Endpoint(
        instance_id=name, epoch=1, rpc_address=rpc_address, transfer_address=transfer_address, host=host_identity()
    )


def layout_of(path: Path, kv_dtype: str = "auto") -> KvLayout:
    return load_model_config(path).kv_layout(BLOCK_SIZE, "float32", kv_dtype)


def load_engine(
    path: Path, num_blocks: int = 64, memory: memoryview | None = None, *, kv_dtype: str = "auto", device: str = "cpu"
) -> Engine:
    """Loads an engine that computes in float32. With quantised KV it uses native kernels, whose results do not depend
    on the batch, so that the codes do not either."""
    own = {"cache_folder": kernels_folder() if layout_of(path, kv_dtype).is_quantised else None, "device": device}
    return steps.load_engine(path, BLOCK_SIZE, kv_dtype=kv_dtype, num_blocks=num_blocks, memory=memory, **own)


def coupled(engine: Engine, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Returns the reference: greedy tokens of one sequence alone in one engine. Overwrites the engine's pool."""
    (tokens,) = steps.tokens_of(engine, [prompt], num_tokens)
    return tokens


@contextmanager
def computing(
    path: Path, num_blocks: int, memory: memoryview, *, ranks: int = 1, **options: str
) -> Iterator[EngineThread]:
    """Starts an engine of one or more ranks over the given memory."""
    with ExitStack() as stack:
        if ranks == 1:
            engine = load_engine(path, num_blocks, memory, **options)
        else:
            shared = threaded_ranks(path, ranks, block_size=BLOCK_SIZE, num_blocks=num_blocks, memory=memory)
            engine = stack.enter_context(shared)
        yield stack.enter_context(closing(EngineThread(engine)))


@asynccontextmanager
async def decoding(
    path: Path,
    num_blocks: int = 48,
    *,
    ranks: int = 1,
    kv_dtype: str = "auto",
    device: str = "cpu",
    keeping: OffloadCosts | None = None,
    **limits: int | bool,
) -> AsyncIterator[tuple[Endpoint, DecodeService]]:
    """Starts a decode worker's service and server in the test's own process."""
    layout = layout_of(path, kv_dtype)
    pool = quiet_pool(num_blocks)
    bounds = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 1000, **limits}
    state = DecodeState(pool, Limits(block_size=BLOCK_SIZE, **bounds), offload_costs=keeping)
    server = RpcServer(TOKEN)
    async with AsyncExitStack() as stack:
        transfer = stack.enter_context(TransferEngine(cluster_token=TOKEN))
        segment = transfer.allocate(layout.pool_bytes(num_blocks))
        pooled = computing(path, num_blocks, segment.buffer, ranks=ranks, kv_dtype=kv_dtype, device=device)
        thread = stack.enter_context(pooled)
        staging = stack.enter_context(closing(staging_of(thread.engine)))
        channels = await stack.enter_async_context(Channels(TOKEN))
        stores = BlockStores(channels, transfer)
        stack.push_async_callback(stores.close)
        memory = KvMemory(segment, layout, num_blocks, staging=staging)
        service = DecodeService(state, thread, transfer, memory, stores=stores)
        zone = LandingZone(
            transfer_address=transfer.address,
            segment_id=segment.segment_id,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            fingerprint=thread.engine.fingerprint,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(service), server.grpc)
        landing = LandingServicer(service, zone)
        worker_pb2_grpc.add_LandingServicer_to_server(landing, server.grpc)
        server.add_socket_service("Landing", landing)
        address = await server.start("127.0.0.1", 0)
        try:
            yield endpoint_of("decode-0", address, transfer.address), service
        finally:
            await asyncio.wait_for(service.finish(), PATIENCE_S)
            await server.stop(0)
            await service.stop()
