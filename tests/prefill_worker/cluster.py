"""A prefill worker over real sockets, memory and a real (tiny) model, with a real decode worker and the ears of a
gateway. Gates hold it at the boundaries where a test wants to look or to cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from decode_worker.service import DecodeService
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.staging import staging_of
from prefill_worker.ledger import Limits
from prefill_worker.service import PrefillService
from prefill_worker.servicer import PrefillServicer
from prefill_worker.state import PrefillState
from protocol.keys import BlockKey
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.profile import PrefillProfile
from protocol.request import Endpoint, PrefixSource, Request
from protocol.rpc import Channels, RpcServer
from tests.channels import PatientChannels
from tests.kvstore.nodes import exists
from tests.patience import PATIENCE_S, answered
from tests.prefill_worker.builders import make_request
from tests.prefill_worker.gates import GatedEngine, GatedLandings, GatedStores, ShiftedClock
from tests.worker.parts import (
    BLOCK_SIZE,
    TOKEN,
    Ears,
    computing,
    coupled,
    decoding,
    endpoint_of,
    layout_of,
    listening,
    load_engine,
    status_of,
    submit,
)
from transfer import FaultPlan, TransferEngine
from worker.memory import KvMemory

LANDING_TTL_S = 30.0
# A slow engine: whatever a store holds is worth reading.
PROFILE = PrefillProfile(c0=0.1, c1=0.1, c2=0.0)


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
        await submit(self.channels, request, self.prefill, decode or self.decode, sources)

    async def cancel(self, name: str) -> None:
        """At both workers, as a gateway does it."""
        for endpoint in (self.prefill, self.decode):
            stub = worker_pb2_grpc.WorkerStub(self.channels.to(endpoint.rpc_address))
            request = worker_pb2.CancelRequest(request_id=name)
            await self.channels.call(stub.Cancel, request, timeout_s=PATIENCE_S)

    async def status(self) -> worker_pb2.WorkerStatus:
        return await status_of(self.channels, self.prefill)

    def expected(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The coupled engine's answer."""
        return coupled(self.reference, token_ids, max_tokens)

    async def until_stored(self, store: Endpoint, keys: Sequence[BlockKey]) -> None:
        """All of these blocks can be read there."""

        async def stored() -> bool:
            return all(await exists(self.stores, store, keys))

        await answered(stored)

    async def assert_drained(self) -> None:
        """No block is held on either side."""
        async with asyncio.timeout(PATIENCE_S):
            await self.service.drained()
            await self.decoder.drained()
        for state in (self.service.state, self.decoder.state):
            state.validate()
            assert state.pool.num_free == state.pool.num_blocks


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
    layout, faults, clock = layout_of(path), FaultPlan(), ShiftedClock()
    async with AsyncExitStack() as stack:
        transfer = stack.enter_context(TransferEngine(cluster_token=TOKEN, faults=faults))
        channels, store_channels = Channels(TOKEN), PatientChannels(TOKEN)
        stores = GatedStores(store_channels, transfer)
        for each in (channels, store_channels, stores):
            stack.push_async_callback(each.close)
        decode, decoder = await stack.enter_async_context(
            decoding(path, decode_blocks, ranks=decode_ranks, device=device)
        )
        segment = transfer.allocate(layout.pool_bytes(num_blocks))
        thread = stack.enter_context(computing(path, num_blocks, segment.buffer, ranks=prefill_ranks, device=device))
        staging = stack.enter_context(closing(staging_of(thread.engine)))
        engine, fingerprint = GatedEngine(thread), thread.engine.fingerprint
        landings = GatedLandings(channels, fingerprint=fingerprint, ttl_s=LANDING_TTL_S)
        pool = BlockPool(num_blocks, on_added=lambda *_: None, on_removed=lambda key: state.evicted(key))
        limits = Limits(
            block_size=BLOCK_SIZE,
            block_bytes=layout.block_bytes,
            max_model_len=1000,
            max_num_batched_tokens=budget,
            max_num_seqs=8,
            num_layers=layout.num_layers,
            layered_loads=layered_loads,
            spare_wait_s=spare_wait_s,
        )
        state = PrefillState(pool, limits, lease_prefix="prefill-0", profile=profile, home_store=home_store)
        service = PrefillService(
            state,
            engine=engine,
            memory=KvMemory(segment, layout, num_blocks, staging=staging),
            transfer=transfer,
            landings=landings,
            stores=stores,
            landing_ttl_s=renewed_as_of_s,
            clock=clock,
        )
        stack.push_async_callback(service.stop)
        server = RpcServer(TOKEN)
        servicer = PrefillServicer(service, block_size=BLOCK_SIZE, vocab_size=260)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc)
        server.add_lean("Worker", servicer)
        stack.push_async_callback(server.stop, 0)
        address = await server.start("127.0.0.1", 0)
        prefill, ears = endpoint_of("prefill-0", address, transfer.address), Ears()
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
            reference=load_engine(path),
            clock=clock,
        )
        assert not service.failed.done(), service.failed
