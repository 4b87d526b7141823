"""Processes that register with the conductor: what stores and workers have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvstore.home_finder import HomeFinder
from protocol.membership import BlockLog, Membership
from protocol.pb import common_pb2, conductor_pb2
from protocol.profile import DecodeProfile, PrefillProfile
from protocol.request import Endpoint
from protocol.wire import endpoint_to_wire, to_message
from tests.simulation.model import FINGERPRINT, LAYOUT, Engine, Pool
from tests.simulation.processes.process import Process, until_one_fails
from tests.simulation.transfer import SimulatedTransfer

CONDUCTOR = "conductor:1"
STOP_GRACE_S = 0.5
PREFILL = PrefillProfile(c0=0.03, c1=0.002, c2=0.0)
DECODE = DecodeProfile(c0=0.03, c1=0.0, c2=0.0)


class Member(Process):
    """A process that registers."""

    blocks: BlockLog
    transfer: SimulatedTransfer

    def make_transfer(self) -> None:
        self.transfer = SimulatedTransfer(self.world.network, self.life, self.world.engines)

    def registration(self) -> conductor_pb2.RegisterRequest:
        return conductor_pb2.RegisterRequest(endpoint=endpoint_to_wire(self.endpoint(self.transfer.address)))

    def load(self) -> conductor_pb2.Load:
        raise NotImplementedError

    def watched(self) -> list[asyncio.Future[Any]]:
        """What ends the process when it fails."""
        return []

    async def serve(self) -> None:
        self.membership = Membership(self.channels, CONDUCTOR, self.registration(), self.load, self.blocks)
        self._belonging = asyncio.ensure_future(self.membership.run())
        await until_one_fails([self._belonging, *self.watched()])

    async def leave(self) -> None:
        """Says good-bye and listens no more."""
        self._belonging.cancel()
        await self.membership.leave()
        self.world.network.servers.pop(self.address, None)
        await asyncio.sleep(STOP_GRACE_S)

    def as_worker(self, num_blocks: int) -> conductor_pb2.RegisterRequest:
        request = Member.registration(self)
        request.layout.CopyFrom(to_message(common_pb2.KvLayout, LAYOUT))
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


class Worker(Member):
    """What both kinds have in common."""

    def find_home(self, found: Callable[[Endpoint], None]) -> HomeFinder | None:
        if not self.world.terms.has_store:
            return None
        return HomeFinder(self.channels, CONDUCTOR, "store-0", found)

    @property
    def home(self) -> str | None:
        return "store-0" if self.world.terms.has_store else None
