"""Simulated processes that register with the conductor: prefill and decode workers, and the base class of stores."""

import asyncio
from typing import Any

from moonserve.decode_worker.decisions.limits_and_counters import Limits as DecodeLimits
from moonserve.decode_worker.decisions.offloading import OffloadCosts
from moonserve.decode_worker.service import DecodeService, LandingServicer, LandingZone
from moonserve.decode_worker.state import DecodeState
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.kvstore.client.blocks import BlockStores
from moonserve.prefill_worker.decisions.shared_state import Limits as PrefillLimits
from moonserve.prefill_worker.decode_client import DecodeClient
from moonserve.prefill_worker.service import PrefillService
from moonserve.prefill_worker.state import PrefillState
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.membership.heartbeats import BlockLog, Membership
from moonserve.protocol.pb import common_pb2, conductor_pb2, worker_pb2_grpc
from moonserve.protocol.request import Role, new_id
from moonserve.protocol.rpc.wire import endpoint_to_wire, role_to_wire, to_message
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile
from moonserve.transfer.config import TransferTimeout
from moonserve.worker.home_finder import HomeFinder
from moonserve.worker.process import KvMemory
from moonserve.worker.service import PrefillServicer, WorkerServicer
from tests.simulation.model import FINGERPRINT, LAYOUT, VOCABULARY, Engine
from tests.simulation.processes.process import Process, until, until_one_fails

CONDUCTOR = "conductor:1"
STOP_GRACE_S = 0.5
PREFILL = PrefillProfile(c0=0.03, c1=0.002, c2=0.0)
DECODE = DecodeProfile(c0=0.03, c1=0.0, c2=0.0)
# So expensive that reading from the store is nearly always faster.
DEAR = PrefillProfile(c0=0.03, c1=1.0, c2=0.0)


class Member(Process):
    """A process that registers with the conductor. Subclasses set `state` and `service`."""

    role: Role
    blocks: BlockLog

    def registration(self) -> conductor_pb2.RegisterRequest:
        endpoint = endpoint_to_wire(self.endpoint())
        return conductor_pb2.RegisterRequest(endpoint=endpoint, role=role_to_wire(self.role))

    def watched(self) -> list[asyncio.Future[Any]]:
        """Returns futures whose failure ends the process."""
        return []

    async def serve(self) -> None:
        registration = self.registration()
        self.membership = Membership(self.channels, CONDUCTOR, registration, self.service.load, self.blocks)
        self._belonging = asyncio.ensure_future(self.membership.run())
        await until_one_fails([self._belonging, *self.watched()])

    async def leave(self) -> None:
        """Leaves the cluster and stops accepting calls."""
        self._belonging.cancel()
        await self.membership.deregister()
        self.world.network.servers.pop(self.address, None)
        await asyncio.sleep(STOP_GRACE_S)

    def validate(self) -> None:
        self.state.validate()


class Worker(Member):
    """Base class of prefill and decode workers."""

    async def start(self) -> None:
        terms, world = self.world.terms, self.world
        self.num_blocks = terms.prefill_blocks if self.role is Role.PREFILL else terms.decode_blocks
        self.home = "store-0" if terms.has_store else None
        self.make_transfer()
        self.segment = self.transfer.allocate(LAYOUT.pool_bytes(self.num_blocks))
        self.blocks = BlockLog(lambda: self.pool.keys())
        self.pool = BlockPool(self.num_blocks, on_added=self.blocks.added, on_removed=self.removed)
        self.memory: Any = KvMemory(self.segment, LAYOUT, self.num_blocks)
        self.stores = BlockStores(self.channels, self.transfer, attaches=False)
        self.engine: Any = Engine(
            self.segment.buffer,
            self.num_blocks,
            world.network.rng,
            lambda: world.network.weather.engine_failures,
            lambda what: world.problem(f"{self.life!r}: {what}"),
        )
        self.service = self.make_service()
        self.finder = HomeFinder(self.channels, CONDUCTOR, self.home, self.service.home_found) if self.home else None

    def make_service(self) -> Any:
        """Creates the service, its state and its servicers."""
        raise NotImplementedError

    def removed(self, key: BlockKey) -> None:
        self.blocks.removed(key)

    def look(self) -> None:
        if self.finder is not None:
            self.finder.look()

    async def drain(self) -> None:
        self.membership.draining = True
        self.membership.wake()
        self.service.drain(True)
        await until(self.service.drained())
        await self.finish()

    async def finish(self) -> None:
        """Leaves the cluster after the drain."""
        raise NotImplementedError

    def registration(self) -> conductor_pb2.RegisterRequest:
        request, terms = super().registration(), self.world.terms
        request.layout.CopyFrom(to_message(common_pb2.KvLayout, LAYOUT))
        request.fingerprint = FINGERPRINT
        request.num_blocks = self.num_blocks
        request.max_num_seqs = terms.max_num_seqs
        request.max_model_len = terms.max_model_len
        request.prefill_profile.CopyFrom(to_message(conductor_pb2.PrefillProfile, PREFILL))
        request.decode_profile.CopyFrom(to_message(conductor_pb2.DecodeProfile, DECODE))
        return request

    def watched(self) -> list[asyncio.Future[Any]]:
        finding = [asyncio.ensure_future(self.finder.run())] if self.finder else []
        return [self.service.failed, *finding]


class Prefill(Worker):
    role = Role.PREFILL

    def make_service(self) -> PrefillService:
        terms = self.world.terms
        limits = PrefillLimits(
            block_size=LAYOUT.block_size,
            block_bytes=LAYOUT.block_bytes,
            max_model_len=terms.max_model_len,
            max_num_batched_tokens=terms.prefill_tokens,
            max_num_seqs=terms.max_num_seqs,
            max_put_blocks=4,
            max_pending_puts=16,
            layered_loads="never",
            computes_before_grant=True,
        )
        prefix = new_id(self.life.name)
        state = PrefillState(self.pool, limits, lease_prefix=prefix, profile=PREFILL, home_store=self.home)
        self.state = self.checked(state)
        service = PrefillService(
            self.state,
            engine=self.engine,
            memory=self.memory,
            transfer=self.transfer,
            landings=DecodeClient(self.channels, fingerprint=FINGERPRINT, ttl_s=terms.landing_ttl_s),
            stores=self.stores,
            landing_ttl_s=terms.landing_ttl_s,
            patience=TransferTimeout(base_s=terms.transfer_timeout_s),
            look_for_home=self.look,
            clock=self.life.clock,
        )
        servicer = PrefillServicer(service, block_size=LAYOUT.block_size, vocab_size=VOCABULARY)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, self.server)
        return service

    def removed(self, key: BlockKey) -> None:
        super().removed(key)
        self.state.on_evicted(key)

    async def finish(self) -> None:
        await self.leave()
        await self.service.stop()

    def registration(self) -> conductor_pb2.RegisterRequest:
        request = super().registration()
        request.home_store = self.home or ""
        request.max_num_batched_tokens = self.world.terms.prefill_tokens
        return request

    def unrest(self) -> str:
        held, sequences = self.state.num_held_blocks, self.state._shared.sequences.values()
        who = ", ".join(f"{each.request_id} {each.phase}" for each in sequences)
        return "" if self.state.is_idle and not held else f"{held} blocks held by {who}"


class Decode(Worker):
    role = Role.DECODE

    def make_service(self) -> DecodeService:
        terms, costs = self.world.terms, None
        if self.home:
            costs = OffloadCosts(prefill=DEAR, block_bytes=LAYOUT.block_bytes, host=self.life.name, with_answers=True)
        limits = DecodeLimits(
            block_size=LAYOUT.block_size,
            max_num_seqs=terms.max_num_seqs,
            max_num_batched_tokens=16,
            max_model_len=terms.max_model_len,
            runs_ahead=terms.runs_ahead,
            speculation=terms.speculation,
        )
        self.state = self.checked(DecodeState(self.pool, limits, None, costs))
        service = DecodeService(
            self.state,
            self.engine,
            self.transfer,
            self.memory,
            stores=self.stores,
            look_for_home=self.look,
            clock=self.life.clock,
        )
        zone = LandingZone(
            transfer_address=self.transfer.address,
            segment_id=self.segment.segment_id,
            num_blocks=self.num_blocks,
            block_size=LAYOUT.block_size,
            fingerprint=FINGERPRINT,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(service), self.server)
        worker_pb2_grpc.add_LandingServicer_to_server(LandingServicer(service, zone), self.server)
        return service

    async def finish(self) -> None:
        await self.service.finish()
        await self.leave()

    def unrest(self) -> str:
        state = self.state
        held = f"{state.num_held_blocks} held, {state.num_leased_blocks} leased"
        windows = sorted(self.transfer.windows)
        is_quiet = state.is_idle and self.pool.num_held == 0 and not windows
        return "" if is_quiet else f"{held}, windows {windows}, {state.num_running} running"
