"""A prefill worker over real sockets, memory and a real (tiny) model, with a real decode worker and the ears of a
gateway. Gates hold it at the boundaries where a test wants to look or to cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from decode_worker.limits import Limits as DecodeLimits
from decode_worker.service import DecodeService
from decode_worker.servicers import LandingServicer, LandingZone
from decode_worker.servicers import WorkerServicer as DecodeServicer
from decode_worker.state import DecodeState
from engine.block_pool import BlockPool
from engine.config import load_model_config
from engine.engine import Engine
from engine.generate import generate
from engine.runtime import EngineThread
from engine.staging import staging_of
from prefill_worker.landing import KvMemory
from prefill_worker.ledger import Limits
from prefill_worker.service import PrefillService
from prefill_worker.servicer import WorkerServicer
from prefill_worker.state import PrefillState
from protocol.keys import BlockKey
from protocol.layout import KvLayout
from protocol.pb import common_pb2, worker_pb2, worker_pb2_grpc
from protocol.process import host_identity
from protocol.profile import PrefillProfile
from protocol.request import Endpoint, Placement, PrefixSource, Request, SamplingParams
from protocol.rpc import Channels, RpcServer
from protocol.wire import submission_to_wire
from tests.channels import PatientChannels
from tests.engine.tensor_parallel.teams import team
from tests.patience import PATIENCE_S, answered
from tests.prefill_worker.builders import make_request
from tests.prefill_worker.gates import GatedEngine, GatedLandings, GatedStores, ShiftedClock
from transfer import FaultPlan, TransferEngine

TOKEN = "secret"
BLOCK_SIZE = 8
LANDING_TTL_S = 30.0
# A slow engine: whatever a store holds is worth reading.
PROFILE = PrefillProfile(c0=0.1, c1=0.1, c2=0.0)


@dataclass
class Ears:
    """What a gateway heard from all workers."""

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
        await self.until(lambda: name in self.finished or name in self.failures)
        assert name not in self.failures, self.failures[name]
        return [token for _, token in sorted(self.tokens[name].items())]

    async def first_token(self, name: str) -> int:
        await self.until(lambda: bool(self.tokens.get(name)))
        return self.tokens[name][0]

    async def failure(self, name: str) -> common_pb2.Failure:
        await self.until(lambda: name in self.failures)
        return self.failures[name]


@dataclass
class Cluster:
    """One prefill worker and what surrounds it."""

    service: PrefillService
    engine: GatedEngine
    stores: GatedStores
    landings: GatedLandings
    faults: FaultPlan
    fingerprint: str
    prefill: Endpoint
    decode: Endpoint
    decoder: DecodeService
    channels: Channels
    ears: Ears
    reference: Engine
    clock: ShiftedClock

    def request(self, name: str, token_ids: Sequence[int], **options: int | float) -> Request:
        return make_request(
            name,
            token_ids,
            block_size=BLOCK_SIZE,
            fingerprint=self.fingerprint,
            **options,  # type: ignore[arg-type]
        )

    async def submit(
        self,
        name: str,
        token_ids: Sequence[int],
        *,
        sources: Sequence[PrefixSource] = (),
        decode: Endpoint | None = None,
        **options: int | float,
    ) -> None:
        request = self.request(name, token_ids, **options)
        placement = Placement(
            request_id=request.request_id,
            prefill=self.prefill,
            decode=decode or self.decode,
            prefix_sources=tuple(sources),
        )
        stub = worker_pb2_grpc.WorkerStub(self.channels.to(self.prefill.rpc_address))
        await self.channels.call(
            stub.Submit, submission_to_wire(request, placement), timeout_s=PATIENCE_S
        )

    async def cancel(self, name: str) -> None:
        """At both workers, as a gateway does it."""
        for endpoint in (self.prefill, self.decode):
            stub = worker_pb2_grpc.WorkerStub(self.channels.to(endpoint.rpc_address))
            request = worker_pb2.CancelRequest(request_id=name)
            await self.channels.call(stub.Cancel, request, timeout_s=PATIENCE_S)

    async def status(self) -> worker_pb2.WorkerStatus:
        stub = worker_pb2_grpc.WorkerStub(self.channels.to(self.prefill.rpc_address))
        status: worker_pb2.WorkerStatus = await self.channels.call(
            stub.GetStatus, worker_pb2.GetStatusRequest(), timeout_s=PATIENCE_S
        )
        return status

    def expected(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The coupled engine's answer."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return generate(self.reference, [token_ids], sampling)[0].token_ids

    async def until_stored(self, store: Endpoint, keys: Sequence[BlockKey]) -> None:
        """All of these blocks can be read there."""

        async def stored() -> bool:
            return all(await self.stores.exists(store, keys))

        await answered(stored)

    async def assert_drained(self) -> None:
        """No block is held on either side."""
        async with asyncio.timeout(PATIENCE_S):
            await self.service.drained()
            if not self.decoder.state.is_idle:
                await self.decoder.idle.wait()
        self.service.validate()
        self.decoder.state.validate()
        status = await self.status()
        assert status.load.free_blocks == status.num_blocks
        decode = self.decoder.state
        assert decode.num_free_blocks == decode.num_blocks


@asynccontextmanager
async def cluster(
    path: Path,
    *,
    num_blocks: int = 48,
    decode_blocks: int = 48,
    budget: int = 20,
    home_store: str | None = None,
    renewed_as_of_s: float = LANDING_TTL_S,
    profile: PrefillProfile = PROFILE,
    layered_loads: str = "auto",
    spare_wait_s: float = PATIENCE_S,
    prefill_ranks: int = 1,
    decode_ranks: int = 1,
    device: str = "cpu",
) -> AsyncIterator[Cluster]:
    """Everything in one process, torn down in reverse order. Landings are renewed as often as those of
    `renewed_as_of_s` must be."""
    layout = load_model_config(path).kv_layout(BLOCK_SIZE, "float32")
    faults, clock = FaultPlan(), ShiftedClock()
    async with AsyncExitStack() as stack:
        transfer = stack.enter_context(TransferEngine(cluster_token=TOKEN, faults=faults))
        channels = Channels(TOKEN)
        store_channels = PatientChannels(TOKEN)
        for each in (channels, store_channels):
            stack.push_async_callback(each.close)
        decode, decoder = await stack.enter_async_context(
            decoding(path, decode_blocks, ranks=decode_ranks, device=device)
        )
        segment = transfer.allocate(layout.pool_bytes(num_blocks))
        thread = stack.enter_context(
            _loaded(path, layout, num_blocks, segment.buffer, prefill_ranks, device)
        )
        staging = stack.enter_context(closing(staging_of(thread.engine)))
        engine, stores = GatedEngine(thread), GatedStores(store_channels, transfer)
        fingerprint = thread.engine.fingerprint
        landings = GatedLandings(channels, fingerprint=fingerprint, ttl_s=LANDING_TTL_S)
        service = PrefillService(
            _make_state(
                num_blocks, budget, home_store, layout, profile, layered_loads, spare_wait_s
            ),
            engine=engine,
            memory=KvMemory(segment, layout, num_blocks, staging=staging),
            transfer=transfer,
            landings=landings,
            stores=stores,
            landing_ttl_s=renewed_as_of_s,
            clock=clock,
        )
        stack.push_async_callback(service.stop)
        address = await stack.enter_async_context(_served(service))
        prefill = _endpoint("prefill-0", address, transfer.address)
        ears = Ears()
        for endpoint in (prefill, decode):
            await stack.enter_async_context(listening(ears, channels, endpoint))
        yield Cluster(
            service=service,
            engine=engine,
            stores=stores,
            landings=landings,
            faults=faults,
            fingerprint=fingerprint,
            prefill=prefill,
            decode=decode,
            decoder=decoder,
            channels=channels,
            ears=ears,
            reference=_load(path, layout, 64, None),
            clock=clock,
        )
        assert not service.failed.done(), service.failed


def _make_state(
    num_blocks: int,
    budget: int,
    home_store: str | None,
    layout: KvLayout,
    profile: PrefillProfile,
    layered_loads: str,
    spare_wait_s: float,
) -> PrefillState:
    limits = Limits(
        block_size=BLOCK_SIZE,
        block_bytes=layout.block_bytes,
        num_blocks=num_blocks,
        max_model_len=1000,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        num_layers=layout.num_layers,
        layered_loads=layered_loads,
        spare_wait_s=spare_wait_s,
    )
    return PrefillState(
        limits,
        lease_prefix="prefill-0",
        profile=profile,
        home_store=home_store,
        on_added=lambda key, parent: None,
        on_removed=lambda key: None,
    )


def _load(
    path: Path, layout: KvLayout, num_blocks: int, memory: memoryview | None, device: str = "cpu"
) -> Engine:
    return Engine.load(
        path,
        config=load_model_config(path),
        layout=layout,
        num_blocks=num_blocks,
        memory=memory,
        device=device,
    )


@contextmanager
def _loaded(
    path: Path, layout: KvLayout, num_blocks: int, memory: memoryview, ranks: int, device: str
) -> Iterator[EngineThread]:
    with ExitStack() as stack:
        if ranks == 1:
            engine = _load(path, layout, num_blocks, memory, device)
        else:
            shared = team(path, ranks, block_size=BLOCK_SIZE, num_blocks=num_blocks, memory=memory)
            engine = stack.enter_context(shared)
        yield stack.enter_context(closing(EngineThread(engine)))


def _endpoint(name: str, rpc_address: str, transfer_address: str) -> Endpoint:
    return Endpoint(
        instance_id=name,
        epoch=1,
        rpc_address=rpc_address,
        transfer_address=transfer_address,
        host=host_identity(),
    )


@asynccontextmanager
async def _served(service: PrefillService) -> AsyncIterator[str]:
    server = RpcServer(TOKEN)
    servicer = WorkerServicer(service, block_size=BLOCK_SIZE, vocab_size=260)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc)
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        await server.stop(0)


@asynccontextmanager
async def decoding(
    path: Path, num_blocks: int, *, ranks: int = 1, device: str = "cpu"
) -> AsyncIterator[tuple[Endpoint, DecodeService]]:
    """The product's decode worker, without its process."""
    layout = load_model_config(path).kv_layout(BLOCK_SIZE, "float32")
    pool = BlockPool(num_blocks, on_added=lambda *_: None, on_removed=lambda _: None)
    limits = DecodeLimits(
        block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=1000
    )
    server, ended = RpcServer(TOKEN), asyncio.Event()
    with ExitStack() as stack:
        transfer = stack.enter_context(TransferEngine(cluster_token=TOKEN))
        segment = transfer.allocate(layout.pool_bytes(num_blocks))
        thread = stack.enter_context(
            _loaded(path, layout, num_blocks, segment.buffer, ranks, device)
        )
        staging = stack.enter_context(closing(staging_of(thread.engine)))
        state = DecodeState(pool, limits)
        service = DecodeService(state, thread, transfer, segment, layout, staging=staging)
        zone = LandingZone(
            transfer_address=transfer.address,
            segment_id=segment.segment_id,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            fingerprint=thread.engine.fingerprint,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(DecodeServicer(service), server.grpc)
        worker_pb2_grpc.add_LandingServicer_to_server(LandingServicer(service, zone), server.grpc)
        address = await server.start("127.0.0.1", 0)
        working = asyncio.create_task(service.run(ended))
        try:
            yield _endpoint("decode-0", address, transfer.address), service
        finally:
            ended.set()
            await asyncio.wait_for(working, PATIENCE_S)
            await server.stop(0)
            service.streams.close()


@asynccontextmanager
async def listening(ears: Ears, channels: Channels, endpoint: Endpoint) -> AsyncIterator[None]:
    """From the first moment on: a worker gives up the requests of a gateway that stays away for seconds."""
    stands = asyncio.Event()
    task = asyncio.create_task(ears.listen(channels, endpoint.rpc_address, stands))
    try:
        await asyncio.wait_for(stands.wait(), PATIENCE_S)
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
