"""Prefill worker, decode worker and a gateway's event listener in the test's own process, with real sockets, real
memory and a tiny model. Gates hold the prefill worker at boundaries where a test inspects or cancels a request."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moonserve.decode_worker.service import DecodeService
from moonserve.engine.engine import Engine, EngineThread, staging_of
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.model.batch import Sampled, Slice
from moonserve.kvstore.client.blocks import BlockStores
from moonserve.kvstore.client.node_access.objects import PutResult, ReadLease
from moonserve.kvstore.config import StoreConfig
from moonserve.kvstore.node.process import serve as serve_store
from moonserve.prefill_worker.decisions.events import CommitHandoff, Landing, ReserveLanding
from moonserve.prefill_worker.decisions.shared_state import Limits
from moonserve.prefill_worker.decode_client import DecodeClient
from moonserve.prefill_worker.service import PrefillService
from moonserve.prefill_worker.state import PrefillState
from moonserve.protocol.pb import worker_pb2, worker_pb2_grpc
from moonserve.protocol.request import Endpoint, LeaseId, PrefixSource, Request
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from moonserve.protocol.step_time import PrefillProfile
from moonserve.transfer import FaultPlan, ScatterTransfer, TransferEngine
from moonserve.transfer.memory.scatter import LOCAL
from moonserve.worker.process import KvMemory
from moonserve.worker.service import PrefillServicer
from tests.decode_worker.world import prompt_of
from tests.kvstore.node.nodes import exists
from tests.patience import PATIENCE_S, PatientChannels, answered
from tests.prefill_worker.builders import make_request
from tests.services import serving
from tests.worker import parts

LANDING_TTL_S = 30.0
# A slow engine, so that reading a stored prefix is always faster than computing it.
PROFILE = PrefillProfile(c0=0.1, c1=0.1, c2=0.0)


@dataclass
class Placed:
    """A prefill worker, the decode worker that it hands off to, and a gateway's event listener."""

    prefill: Endpoint
    decode: Endpoint
    decoder: DecodeService
    channels: Channels
    ears: parts.Ears
    reference: Engine

    def request(self, name: str, token_ids: Sequence[int], **options: Any) -> Request:
        fingerprint = self.reference.fingerprint
        return make_request(name, token_ids, block_size=parts.BLOCK_SIZE, fingerprint=fingerprint, **options)

    async def submit(
        self, name: str, token_ids: Sequence[int], *, sources: Sequence[PrefixSource] = (), **options: Any
    ) -> None:
        """Submits a request with its placement. `options`: `decode`, if another worker than this one's, and wishes."""
        decode = options.pop("decode", self.decode)
        await parts.submit(self.channels, self.request(name, token_ids, **options), self.prefill, decode, sources)

    async def status(self) -> worker_pb2.WorkerStatus:
        return await parts.status_of(self.channels, self.prefill)

    def expected(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Returns the tokens that the coupled engine generates for this prompt."""
        return parts.coupled(self.reference, token_ids, max_tokens)


@dataclass
class Cluster(Placed):
    """A `Placed` whose processes all run in the test's own process."""

    service: PrefillService
    engine: "GatedEngine"
    stores: "GatedStores"
    landings: "GatedLandings"
    faults: FaultPlan

    async def cancel(self, name: str) -> None:
        """Cancels a request at both workers, as a gateway does."""
        for endpoint in (self.prefill, self.decode):
            stub = worker_pb2_grpc.WorkerStub(self.channels.to(endpoint.rpc_address))
            request = worker_pb2.CancelRequest(request_id=name)
            await self.channels.call(stub.Cancel, request, timeout_s=PATIENCE_S)

    async def assert_drained(self) -> None:
        """Waits until both workers are drained and checks that no block is held on either side."""
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
    home_store: str | None = None,
    renewed_as_of_s: float = LANDING_TTL_S,
    profile: PrefillProfile = PROFILE,
    prefill_ranks: int = 1,
    decode_ranks: int = 1,
    kv_dtype: str = "auto",
    device: str = "cpu",
    **limits: Any,
) -> AsyncIterator[Cluster]:
    """Starts a cluster and stops its parts in reverse order. Landing leases are renewed as often as a lease with a
    time to live of `renewed_as_of_s` requires."""
    layout, faults = parts.layout_of(path, kv_dtype), FaultPlan()
    computed: Any = {"kv_dtype": kv_dtype, "device": device}
    async with AsyncExitStack() as stack:
        transfer = stack.enter_context(TransferEngine(cluster_token=parts.TOKEN, faults=faults))
        channels = await stack.enter_async_context(Channels(parts.TOKEN))
        stores = GatedStores(await stack.enter_async_context(PatientChannels(parts.TOKEN)), transfer)
        stack.push_async_callback(stores.close)
        decode, decoder = await stack.enter_async_context(
            parts.decoding(path, decode_blocks, ranks=decode_ranks, **computed)
        )
        segment = transfer.allocate(layout.pool_bytes(num_blocks))
        thread = stack.enter_context(parts.computing(path, num_blocks, segment.buffer, ranks=prefill_ranks, **computed))
        staging = stack.enter_context(closing(staging_of(thread.engine)))
        engine = GatedEngine(thread)
        landings = GatedLandings(channels, fingerprint=thread.engine.fingerprint, ttl_s=LANDING_TTL_S)
        pool = BlockPool(num_blocks, on_added=lambda *_: None, on_removed=lambda key: state.on_evicted(key))
        bounds = Limits(
            block_size=parts.BLOCK_SIZE,
            block_bytes=layout.block_bytes,
            max_model_len=1000,
            max_num_batched_tokens=20,
            max_num_seqs=8,
            num_layers=layout.num_layers,
            **{"spare_wait_s": PATIENCE_S, "computes_before_grant": True, **limits},
        )
        state = PrefillState(pool, bounds, lease_prefix="prefill-0", profile=profile, home_store=home_store)
        service = PrefillService(
            state,
            engine=engine,
            memory=KvMemory(segment, layout, num_blocks, staging=staging),
            transfer=transfer,
            landings=landings,
            stores=stores,
            landing_ttl_s=renewed_as_of_s,
        )
        stack.push_async_callback(service.stop)
        server = RpcServer(parts.TOKEN)
        servicer = PrefillServicer(service, block_size=parts.BLOCK_SIZE, vocab_size=260)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc)
        server.add_socket_service("Worker", servicer)
        address = await stack.enter_async_context(server.serving("127.0.0.1", 0, 0))
        prefill, ears = parts.endpoint_of("prefill-0", address, transfer.address), parts.Ears()
        for endpoint in (prefill, decode):
            await stack.enter_async_context(parts.listening(ears, channels, endpoint))
        reference = parts.load_engine(path, kv_dtype=kv_dtype)
        yield Cluster(prefill, decode, decoder, channels, ears, reference, service, engine, stores, landings, faults)
        assert not service.failed.done(), service.failed


class Gate:
    """Barrier that is open unless a test closes it. `reached` is set once a caller has come to it."""

    def __init__(self) -> None:
        self._open, self.reached = asyncio.Event(), asyncio.Event()
        self.open, self.close = self._open.set, self._open.clear
        self.open()

    async def pass_through(self) -> None:
        self.reached.set()
        await self._open.wait()


class GatedEngine:
    """Engine whose steps a test can hold. `num_tokens` counts the computed tokens."""

    def __init__(self, thread: EngineThread) -> None:
        self.thread = thread
        self.gate = Gate()
        self.num_tokens = 0

    async def execute(self, slices: Sequence[Slice], *arguments: Any, **options: Any) -> list[Sampled | None]:
        await self.gate.pass_through()
        self.num_tokens += sum(piece.num_tokens for piece in slices)
        return await self.thread.execute(slices, *arguments, **options)


class GatedStores(BlockStores):
    """Store client whose reads a test can hold. It uses long timeouts, so that a busy machine does not change what a
    worker reads."""

    def __init__(self, channels: PatientChannels, transfer: TransferEngine) -> None:
        super().__init__(channels, transfer)
        self.gate = Gate()
        self.turns = Gate()
        """Holds the turns of a layered read after the first `num_ungated_turns`."""
        self.num_turns, self.num_ungated_turns = 0, 1
        self.damaged_turns: set[int] = set()
        """Turns in which one byte of the last block is corrupted."""

    async def transfer(self, lease: ReadLease, transfer: ScatterTransfer, *, deadline_s: float) -> None:
        if self.num_turns >= self.num_ungated_turns:
            await self.turns.pass_through()
        turn, self.num_turns = self.num_turns, self.num_turns + 1
        await super().transfer(lease, transfer, deadline_s=PATIENCE_S)
        if turn in self.damaged_turns:
            transfer.local.buffer[transfer.rows[-1, LOCAL]] ^= 0xFF

    async def read(self, *arguments: Any, **options: Any) -> list[int]:
        await self.gate.pass_through()
        return await super().read(*arguments, **options | {"deadline_s": PATIENCE_S})

    async def lease(self, *arguments: Any, **options: Any) -> ReadLease:
        await self.gate.pass_through()
        return await super().lease(*arguments, **options | {"ttl_s": PATIENCE_S, "timeout_s": PATIENCE_S})

    async def put(self, *arguments: Any, **options: Any) -> PutResult:
        return await super().put(*arguments, **options | {"deadline_s": PATIENCE_S})


class GatedLandings(DecodeClient):
    """Landing client whose reservations and commits a test can hold and whose renewals it can await."""

    def __init__(self, channels: Channels, *, fingerprint: str, ttl_s: float) -> None:
        super().__init__(channels, fingerprint=fingerprint, ttl_s=ttl_s)
        self.reserving, self.gate = Gate(), Gate()
        self.renewed: asyncio.Queue[LeaseId] = asyncio.Queue()
        """Leases whose renewal a decode worker accepted."""

    async def reserve(self, action: ReserveLanding) -> Landing:
        await self.reserving.pass_through()
        return await super().reserve(action)

    async def renew(self, decode: Endpoint, lease_id: LeaseId) -> None:
        await super().renew(decode, lease_id)
        self.renewed.put_nowait(lease_id)

    async def commit(self, action: CommitHandoff) -> tuple[int, ...]:
        await self.gate.pass_through()
        return await super().commit(action)


NUM_STORED = 5
PROMPT = prompt_of(NUM_STORED * parts.BLOCK_SIZE + 3)


def source_of(store: Endpoint, num_blocks: int = NUM_STORED, first: int = 0) -> PrefixSource:
    return PrefixSource(store=store, first_block=first, num_blocks=num_blocks)


@asynccontextmanager
async def store_node(c: Cluster, disk: str | None = None) -> AsyncIterator[Endpoint]:
    """Starts a store node in the test's own process."""
    config = StoreConfig(instance_id="store-0", cluster_token=parts.TOKEN, dram=4 * 2**20, ssd=disk)
    async with serving(serve_store, config) as facts:
        yield await c.stores.locate(facts["rpc"])


async def put_into(c: Cluster, store: Endpoint, prompts: Sequence[Sequence[int]]) -> None:
    """Computes the given prompts and waits until their blocks are in the worker's home store."""
    c.service.home_found(store)
    for number, prompt in enumerate(prompts):
        await c.submit(f"w{number}", prompt, max_tokens=1)
        await c.ears.all_tokens(f"w{number}")
        await answered(partial(exists, c.stores, store, c.request(f"w{number}", prompt).block_keys), all)


@asynccontextmanager
async def stored_prompt(path: Path) -> AsyncIterator[Endpoint]:
    """Starts a store node that holds the blocks of PROMPT."""
    async with cluster(path, home_store="store-0") as writer, store_node(writer) as store:
        await put_into(writer, store, [PROMPT])
        yield store
