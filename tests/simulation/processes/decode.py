"""A decode worker of a simulated cluster."""

from __future__ import annotations

import asyncio
from typing import Any

from decode_worker.keeping import KeepingCosts
from decode_worker.limits import Limits as DecodeLimits
from decode_worker.service import DecodeService
from decode_worker.servicers import LandingServicer, LandingZone
from decode_worker.state import DecodeState
from engine.block_pool import BlockPool
from kvstore.client.blocks import BlockStores
from protocol.ids import Role
from protocol.membership import BlockLog
from protocol.pb import common_pb2, conductor_pb2, worker_pb2_grpc
from protocol.profile import PrefillProfile
from tests.simulation.model import FINGERPRINT, LAYOUT
from tests.simulation.processes.member import Worker
from tests.simulation.processes.process import until
from worker.memory import KvMemory
from worker.service import WorkerServicer


class Decode(Worker):
    role = Role.DECODE

    async def start(self) -> None:
        terms = self.world.terms
        self.make_transfer()
        segment = self.transfer.allocate(LAYOUT.pool_bytes(terms.decode_blocks))
        self.blocks = BlockLog(lambda: self.pool.keys())
        self.pool = BlockPool(terms.decode_blocks, on_added=self.blocks.added, on_removed=self.blocks.removed)
        self.state = self.checked(DecodeState(self.pool, self._limits(), None, self._costs()))
        self.service = DecodeService(
            self.state,
            self.engine(segment.buffer, terms.decode_blocks),
            self.transfer,  # type: ignore[arg-type]
            KvMemory(segment, LAYOUT, terms.decode_blocks),  # type: ignore[arg-type]
            stores=BlockStores(
                self.channels,
                self.transfer,  # type: ignore[arg-type]
                attaches=False,
            ),
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
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(self.service), self.server)
        landing = LandingServicer(self.service, zone)
        worker_pb2_grpc.add_LandingServicer_to_server(landing, self.server)

    async def drain(self) -> None:
        self.membership.draining = True
        self.membership.wake()
        self.service.drain(True)
        await until(self.service.drained())
        await self.service.finish()
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
        return KeepingCosts(prefill=dear, block_bytes=LAYOUT.block_bytes, host=self.life.name, with_answers=True)

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
        return [self.service.failed, *finding]

    def validate(self) -> None:
        self.state.validate()

    def unrest(self) -> str:
        state = self.state
        held = f"{state.num_held_blocks} held, {state.num_leased_blocks} leased"
        windows = sorted(self.transfer.windows)
        is_quiet = state.is_idle and self.pool.num_held == 0 and not windows
        return "" if is_quiet else f"{held}, windows {windows}, {state.num_running} running"
