"""The cluster's processes, put together as their own entry points do, over simulated network, memory, model and time.

Everything that decides or awaits is the product's: states, services, servicers, clients, membership. Each process is
one `Life`; `validate` runs after every event of its state.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from conductor.events import Heartbeat, Tick
from conductor.policies import make_policy
from conductor.service import ConductorService
from conductor.state import ConductorState
from conductor.state import Limits as ConductorLimits
from decode_worker import events as decode_events
from decode_worker.keeping import KeepingCosts
from decode_worker.limits import Limits as DecodeLimits
from decode_worker.service import DecodeService
from decode_worker.servicers import LandingServicer, LandingZone
from decode_worker.servicers import WorkerServicer as DecodeServicer
from decode_worker.state import DecodeState
from engine.block_pool import BlockPool
from gateway.detokenize import ByteDecoder
from gateway.ledger import PHASES
from gateway.service import Gateway
from kvstore import eviction
from kvstore.allocator import ALIGNMENT
from kvstore.block_client import BlockClient
from kvstore.catalog import Catalog
from kvstore.config import StoreConfig
from kvstore.event_log import EventLog, ToAll
from kvstore.home_finder import HomeFinder
from kvstore.native.library import key_index
from kvstore.node import ToConductor
from kvstore.service import StoreService
from kvstore.state import StoreState
from kvstore.stored import Watermarks
from prefill_worker.landing import KvMemory
from prefill_worker.landing_client import LandingClient
from prefill_worker.ledger import Limits as PrefillLimits
from prefill_worker.service import PrefillService
from prefill_worker.servicer import WorkerServicer as PrefillServicer
from prefill_worker.state import PrefillState
from protocol.errors import MoonserveError
from protocol.ids import GatewayId, Role, new_id
from protocol.keys import NO_PARENT
from protocol.membership import BlockLog, Membership
from protocol.metrics import request_metrics, scheduler_metrics
from protocol.pb import (
    common_pb2,
    conductor_pb2,
    conductor_pb2_grpc,
    kvstore_pb2_grpc,
    worker_pb2_grpc,
)
from protocol.profile import DecodeProfile, PrefillProfile
from protocol.request import Endpoint
from protocol.wire import endpoint_to_wire, layout_to_wire
from tests.simulation.loop import Life
from tests.simulation.model import FINGERPRINT, LAYOUT, VOCABULARY, Engine, Pool
from tests.simulation.network import Network, Server, SimulatedChannels
from tests.simulation.terms import Terms
from tests.simulation.transfer import SimulatedTransfer
from transfer.patience import Patience

CONDUCTOR = "conductor:1"
CHARACTERS = tuple(bytes([0x40 + token]) for token in range(VOCABULARY))
SELDOM = 16
STOP_GRACE_S, DRAIN_S = 0.5, 6.0
PREFILL = PrefillProfile(c0=0.03, c1=0.002, c2=0.0)
DECODE = DecodeProfile(c0=0.03, c1=0.0, c2=0.0)
# One for all worlds: they are only added to.
REQUEST_METRICS = request_metrics(CollectorRegistry(), "model", "gateway", PHASES)
SCHEDULER_METRICS = scheduler_metrics(CollectorRegistry())


class Surroundings(Protocol):
    """What processes need of the world."""

    network: Network
    engines: dict[str, SimulatedTransfer]
    terms: Terms

    def problem(self, what: str) -> None: ...


class Process:
    """One life of one process. Subclasses build themselves in `start`, in the event loop and in their life."""

    role: Role | None = None

    def __init__(self, world: Surroundings, life: Life, address: str) -> None:
        self.world = world
        self.life = life
        self.address = address
        self.channels = SimulatedChannels(world.network, life)
        self.server = Server(world.network, life)
        self.is_up = False
        self.is_draining = False

    @property
    def serves(self) -> bool:
        """Whether it is there for what is new."""
        return self.is_up and self.life.is_alive and not self.is_draining

    async def run(self) -> None:
        """Until it dies. Raises what ends it."""
        await self.start()
        self.server.listen(self.address)
        self.is_up = True
        await self.serve()

    async def start(self) -> None:
        raise NotImplementedError

    async def serve(self) -> None:
        raise NotImplementedError

    async def drain(self) -> None:
        """As after SIGTERM: returns when what is under way has ended, or has had its time."""

    def validate(self) -> None:
        """Raises AssertionError."""

    def unrest(self) -> str:
        """What it still holds though nobody wants anything of it; empty when all is well."""
        return ""

    def endpoint(self, transfer_address: str) -> Endpoint:
        return Endpoint(
            instance_id=self.life.name,
            epoch=self.life.epoch,
            rpc_address=self.address,
            transfer_address=transfer_address,
            host=self.life.name,
        )

    def checked(self, state: Any, *, seldom: tuple[type, ...] = ()) -> Any:
        """Its `handle` proves the state's books after every event, and tells of whatever it raises. `seldom`: events
        after which it does so now and then."""
        handle: Callable[[Any, float], Any] = state.handle
        numbers = itertools.count()

        def handle_and_validate(event: Any, now: float) -> Any:
            try:
                done = handle(event, now)
                if not isinstance(event, seldom) or next(numbers) % SELDOM == 0:
                    state.validate()
            except MoonserveError:
                raise
            except Exception:
                about = f"{self.life!r} at {type(event).__name__}"
                self.world.problem(f"{about}: {traceback.format_exc(limit=-6)}")
                raise
            return done

        state.handle = handle_and_validate
        return state


async def until(idle: Coroutine[Any, Any, Any]) -> None:
    """Or until a drain has taken too long."""
    try:
        async with asyncio.timeout(DRAIN_S):
            await idle
    except TimeoutError:
        return


class Conductor(Process):
    """Alone in its cluster; it forgets everything when it dies."""

    async def start(self) -> None:
        terms = self.world.terms
        limits = ConductorLimits(
            ttft_slo_s=1e6, tbt_slo_s=1e6, placement_ttl_s=60.0, num_decisions=64
        )
        policy = make_policy(terms.policy, 1.5, terms.seed)
        # Its books are many arrays: proving them after each heartbeat would take most of the time.
        self.state = self.checked(ConductorState(policy, limits), seldom=(Heartbeat, Tick))
        self.service = ConductorService(self.state, SCHEDULER_METRICS, self.life.clock)
        conductor_pb2_grpc.add_ConductorServicer_to_server(self.service, self.server)

    async def serve(self) -> None:
        await self.service.housekeep(1.0)

    def validate(self) -> None:
        self.state.validate()


class Member(Process):
    """A process that registers."""

    blocks: BlockLog
    transfer: SimulatedTransfer

    def make_transfer(self) -> None:
        self.transfer = SimulatedTransfer(self.world.network, self.life, self.world.engines)

    def registration(self) -> conductor_pb2.RegisterRequest:
        return conductor_pb2.RegisterRequest(
            endpoint=endpoint_to_wire(self.endpoint(self.transfer.address))
        )

    def load(self) -> conductor_pb2.Load:
        raise NotImplementedError

    def watched(self) -> list[asyncio.Future[Any]]:
        """What ends the process when it fails."""
        return []

    async def serve(self) -> None:
        self.membership = Membership(
            self.channels, CONDUCTOR, self.registration(), self.load, self.blocks
        )
        self._belonging = asyncio.ensure_future(self.membership.run())
        watched = [self._belonging, *self.watched()]
        while watched:
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                if not future.cancelled():  # by `leave`
                    future.result()
            watched = [future for future in watched if not future.done()]
        await asyncio.get_running_loop().create_future()  # it has drained and is about to end

    async def leave(self) -> None:
        """Says good-bye and listens no more."""
        self._belonging.cancel()
        await self.membership.leave()
        self.world.network.servers.pop(self.address, None)
        await asyncio.sleep(STOP_GRACE_S)

    def as_worker(self, num_blocks: int) -> conductor_pb2.RegisterRequest:
        request = Member.registration(self)
        request.layout.CopyFrom(layout_to_wire(LAYOUT))
        request.fingerprint = FINGERPRINT
        request.num_blocks = num_blocks
        request.max_num_seqs = self.world.terms.max_num_seqs
        request.max_model_len = self.world.terms.max_model_len
        profile = conductor_pb2.PrefillProfile(c0=PREFILL.c0, c1=PREFILL.c1, c2=PREFILL.c2)
        request.prefill_profile.CopyFrom(profile)
        steps = conductor_pb2.DecodeProfile(c0=DECODE.c0, c1=DECODE.c1, c2=DECODE.c2)
        request.decode_profile.CopyFrom(steps)
        return request

    def engine(self, memory: memoryview, num_blocks: int) -> Engine:
        world = self.world
        return Engine(
            Pool(memory, num_blocks),
            world.network.rng,
            lambda: world.network.weather.engine_failures,
            lambda what: world.problem(f"{self.life!r}: {what}"),
        )


class Store(Member):
    """In memory only: disks have a simulation of their own (tests/kvstore)."""

    role = Role.STORE

    async def start(self) -> None:
        self.make_transfer()
        segment = self.transfer.allocate(self.world.terms.store_blocks * ALIGNMENT)
        events = EventLog()
        self.blocks = BlockLog(self._inventory)
        catalog = Catalog(
            segment.nbytes,
            index=key_index(),
            policies=lambda: eviction.make("lru"),
            announce=ToAll([events, ToConductor(self.blocks)]),
            watermarks=Watermarks(evict_above=0.9, evict_share=0.05),
            quotas={},
            first_generation=self.life.epoch << 32,
        )
        self.state = StoreState(catalog)
        config = StoreConfig(instance_id=self.life.name, cluster_token="token")
        self.service = StoreService(
            config,
            self.transfer,  # type: ignore[arg-type]
            segment,  # type: ignore[arg-type]
            self.endpoint(self.transfer.address),
            self.state,
            None,  # type: ignore[arg-type]  # an index that nobody here maps
            events,
            self.life.clock,
        )
        self._prove_after_changes()
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(self.service, self.server)

    def _prove_after_changes(self) -> None:
        changed = self.service._changed

        def changed_and_proven() -> None:
            changed()
            self.validate()

        self.service._changed = changed_and_proven  # type: ignore[method-assign]

    def _inventory(self) -> list[Any]:
        return [(stored.key, stored.parent or NO_PARENT) for stored in self.state.objects()]

    def registration(self) -> conductor_pb2.RegisterRequest:
        request = super().registration()
        request.role = common_pb2.ROLE_STORE
        return request

    def load(self) -> conductor_pb2.Load:
        return self.service.load()

    def validate(self) -> None:
        self.state.validate()

    def unrest(self) -> str:
        usage = self.state.usage()
        held = [f"{usage.num_leased} leased"] if usage.num_leased else []
        held += [f"windows {sorted(self.transfer.windows)}"] if self.transfer.windows else []
        return ", ".join(held)


class Worker(Member):
    """What both kinds have in common."""

    def find_home(self, found: Callable[[Endpoint], None]) -> HomeFinder | None:
        if not self.world.terms.has_store:
            return None
        return HomeFinder(self.channels, CONDUCTOR, "store-0", found)

    @property
    def home(self) -> str | None:
        return "store-0" if self.world.terms.has_store else None


class Prefill(Worker):
    role = Role.PREFILL

    async def start(self) -> None:
        terms = self.world.terms
        self.make_transfer()
        segment = self.transfer.allocate(LAYOUT.pool_bytes(terms.prefill_blocks))
        self.blocks = BlockLog(lambda: self.state.pool.keys())
        self.state = self.checked(self._state())
        memory = KvMemory(segment, LAYOUT, terms.prefill_blocks)  # type: ignore[arg-type]
        self.service = PrefillService(
            self.state,
            engine=self.engine(segment.buffer, terms.prefill_blocks),
            memory=memory,
            transfer=self.transfer,  # type: ignore[arg-type]
            landings=LandingClient(
                self.channels, fingerprint=FINGERPRINT, ttl_s=terms.landing_ttl_s
            ),
            stores=BlockClient(self.channels, self.transfer),  # type: ignore[arg-type]
            landing_ttl_s=terms.landing_ttl_s,
            patience=Patience(base_s=terms.transfer_timeout_s),
            look_for_home=self._look,
            clock=self.life.clock,
        )
        self.finder = self.find_home(self.service.home_found)
        self._servicer = PrefillServicer(
            self.service, block_size=LAYOUT.block_size, vocab_size=VOCABULARY
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self._servicer, self.server)

    async def drain(self) -> None:
        self._servicer.draining = self.membership.draining = True
        self.membership.wake()
        await until(self.service.drained())
        await self.leave()
        await self.service.stop()

    def _state(self) -> PrefillState:
        terms = self.world.terms
        return PrefillState(
            PrefillLimits(
                block_size=LAYOUT.block_size,
                block_bytes=LAYOUT.block_bytes,
                num_blocks=terms.prefill_blocks,
                max_model_len=terms.max_model_len,
                max_num_batched_tokens=terms.prefill_tokens,
                max_num_seqs=terms.max_num_seqs,
                max_put_blocks=4,
                max_pending_puts=16,
                layered_loads="never",
            ),
            lease_prefix=new_id(self.life.name),
            profile=PREFILL,
            home_store=self.home,
            on_added=self.blocks.added,
            on_removed=self.blocks.removed,
        )

    def _look(self) -> None:
        if self.finder is not None:
            self.finder.look()

    def registration(self) -> conductor_pb2.RegisterRequest:
        request = self.as_worker(self.world.terms.prefill_blocks)
        request.role = common_pb2.ROLE_PREFILL
        request.home_store = self.home or ""
        request.max_num_batched_tokens = self.world.terms.prefill_tokens
        return request

    def load(self) -> conductor_pb2.Load:
        return self.service.load()

    def watched(self) -> list[asyncio.Future[Any]]:
        finding = [asyncio.ensure_future(self.finder.run())] if self.finder else []
        return [self.service.failed, *finding]

    def validate(self) -> None:
        self.state.validate()

    def unrest(self) -> str:
        held = self.state.num_held_blocks
        return "" if self.state.is_idle and not held else f"{held} blocks held by {self._who()}"

    def _who(self) -> str:
        sequences = self.state._ledger.sequences.values()
        return ", ".join(f"{each.request_id} {each.phase}" for each in sequences)


class Decode(Worker):
    role = Role.DECODE

    async def start(self) -> None:
        terms = self.world.terms
        self.make_transfer()
        segment = self.transfer.allocate(LAYOUT.pool_bytes(terms.decode_blocks))
        self.blocks = BlockLog(lambda: self.pool.keys())
        self.pool = BlockPool(
            terms.decode_blocks, on_added=self.blocks.added, on_removed=self.blocks.removed
        )
        self.state = self.checked(DecodeState(self.pool, self._limits(), None, self._costs()))
        self.service = DecodeService(
            self.state,
            self.engine(segment.buffer, terms.decode_blocks),
            self.transfer,  # type: ignore[arg-type]
            segment,  # type: ignore[arg-type]
            LAYOUT,
            stores=BlockClient(self.channels, self.transfer),  # type: ignore[arg-type]
            look_for_home=self._look,
            clock=self.life.clock,
        )
        self.finder = self.find_home(self.service.home_found)
        zone = LandingZone(
            transfer_address=self.transfer.address,
            segment_id=segment.segment_id,
            num_blocks=terms.decode_blocks,
            block_size=LAYOUT.block_size,
            fingerprint=FINGERPRINT,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(DecodeServicer(self.service), self.server)
        landing = LandingServicer(self.service, zone)
        worker_pb2_grpc.add_LandingServicer_to_server(landing, self.server)

    async def drain(self) -> None:
        self.membership.draining = True
        self.membership.wake()
        self.service.handle(decode_events.DrainStarted())
        await until(self.service.idle.wait())
        self._stopping.set()
        await self.leave()

    def _limits(self) -> DecodeLimits:
        terms = self.world.terms
        return DecodeLimits(
            block_size=LAYOUT.block_size,
            max_num_seqs=terms.max_num_seqs,
            max_num_batched_tokens=16,
            max_model_len=terms.max_model_len,
            runs_ahead=terms.runs_ahead,
        )

    def _costs(self) -> KeepingCosts | None:
        if not self.world.terms.has_store:
            return None
        # So dear that the store is nearly always worth it.
        dear = PrefillProfile(c0=0.03, c1=1.0, c2=0.0)
        return KeepingCosts(
            prefill=dear, block_bytes=LAYOUT.block_bytes, host=self.life.name, with_answers=True
        )

    def _look(self) -> None:
        if self.finder is not None:
            self.finder.look()

    def registration(self) -> conductor_pb2.RegisterRequest:
        request = self.as_worker(self.world.terms.decode_blocks)
        request.role = common_pb2.ROLE_DECODE
        return request

    def load(self) -> conductor_pb2.Load:
        return self.service.load()

    def watched(self) -> list[asyncio.Future[Any]]:
        finding = [asyncio.ensure_future(self.finder.run())] if self.finder else []
        self._stopping = asyncio.Event()
        working = asyncio.ensure_future(self.service.run(self._stopping))
        return [working, *finding]

    def validate(self) -> None:
        self.state.validate()

    def unrest(self) -> str:
        state = self.state
        held = f"{state.num_held_blocks} held, {state.num_leased_blocks} leased"
        windows = sorted(self.transfer.windows)
        is_quiet = state.is_idle and self.pool.num_held == 0 and not windows
        return "" if is_quiet else f"{held}, windows {windows}, {state.num_running} running"


class SpelledOut:
    """A tokenizer whose tokens are characters."""

    def decoder(self, *, skip_special_tokens: bool = True) -> ByteDecoder:
        return ByteDecoder(CHARACTERS)


class Front(Process):
    """A gateway without its HTTP."""

    async def start(self) -> None:
        self.gateway = Gateway(
            channels=self.channels,
            conductor_addresses=CONDUCTOR,
            instance_id=self.life.name,
            rpc_address="",
            gateway_id=GatewayId(new_id(self.life.name)),
            tokenizer=SpelledOut(),  # type: ignore[arg-type]
            metrics=REQUEST_METRICS,
            timeout_s=self.world.terms.time_limit_s,
        )

    @property
    def is_ready(self) -> bool:
        """As its /ready says, whoever asks."""
        asyncio._set_running_loop(self.world.network.loop)
        try:
            return self.gateway.is_ready
        finally:
            asyncio._set_running_loop(None)

    async def serve(self) -> None:
        await self.gateway.run()

    async def drain(self) -> None:
        self.gateway.drain(refuses=True)
        await until(self._has_answered_all())
        await self.gateway.close()

    async def _has_answered_all(self) -> None:
        while self.gateway.num_live:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.1)

    def unrest(self) -> str:
        return f"{self.gateway.num_live} generations" if self.gateway.num_live else ""
