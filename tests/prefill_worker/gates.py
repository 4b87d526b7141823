"""Where a test holds, slows down or moves a prefill worker: its engine, its stores, its landings, its clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.batch import HiddenStates, Sampled, Slice
from engine.runtime import EngineThread
from kvstore.client.blocks import BlockStores
from kvstore.client.objects import ReadLease
from kvstore.client.spots import Spots
from prefill_worker.actions import CommitHandoff
from prefill_worker.landing_client import LandingClient
from protocol.ids import LeaseId
from protocol.keys import BlockKey
from protocol.request import Endpoint
from protocol.rpc import Channels
from tests.channels import PatientChannels
from tests.patience import PATIENCE_S
from transfer import ScatterTransfer, TransferEngine
from transfer.scatter import LOCAL


class Gate:
    """Open unless closed; `reached` is set while somebody waits at it."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.reached = asyncio.Event()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def pass_through(self) -> None:
        self.reached.set()
        await self._open.wait()


class GatedEngine:
    """An engine whose steps a test can hold."""

    def __init__(self, thread: EngineThread) -> None:
        self.thread = thread
        self.gate = Gate()
        self.num_tokens = 0

    async def execute(
        self,
        slices: Sequence[Slice],
        on_layer: Callable[[int], None] | None = None,
        *,
        before_attention: Callable[[int], None] | None = None,
        hidden: HiddenStates | None = None,
    ) -> list[Sampled | None]:
        await self.gate.pass_through()
        self.num_tokens += sum(piece.num_tokens for piece in slices)
        return await self.thread.execute(slices, on_layer, before_attention=before_attention, hidden=hidden)


class GatedStores(BlockStores):
    """A store client whose reads a test can hold or slow down, and which waits for a store for long: what a worker
    reads is not to hang on how busy the machine is."""

    def __init__(self, channels: PatientChannels, transfer: TransferEngine) -> None:
        super().__init__(channels, transfer)
        self.gate = Gate()
        self.delay_s = 0.0
        self.turns = Gate()
        """Of a prefix that is read layer by layer, behind the first turn."""
        self.num_turns, self.num_ungated_turns = 0, 1
        self.damaged_turns: set[int] = set()
        """In these a byte of the last block comes out wrong."""

    async def transfer(self, lease: ReadLease, transfer: ScatterTransfer, *, deadline_s: float) -> None:
        if self.num_turns >= self.num_ungated_turns:
            await self.turns.pass_through()
        turn, self.num_turns = self.num_turns, self.num_turns + 1
        await super().transfer(lease, transfer, deadline_s=PATIENCE_S)
        if turn in self.damaged_turns:
            transfer.local.buffer[transfer.rows[-1, LOCAL]] ^= 0xFF

    async def read(self, store: Endpoint, keys: Sequence[BlockKey], spots: Spots, *, deadline_s: float) -> list[int]:
        await self.gate.pass_through()
        await asyncio.sleep(self.delay_s)
        return await super().read(store, keys, spots, deadline_s=PATIENCE_S)

    async def lease(
        self, store: Endpoint, keys: Sequence[BlockKey], *, ttl_s: float = 10.0, timeout_s: float = 2.0
    ) -> ReadLease:
        await self.gate.pass_through()
        await asyncio.sleep(self.delay_s)
        return await super().lease(store, keys, ttl_s=PATIENCE_S, timeout_s=timeout_s)


class GatedLandings(LandingClient):
    """A landing client whose commits a test can hold, and whose renewals it can wait for."""

    def __init__(self, channels: Channels, *, fingerprint: str, ttl_s: float) -> None:
        super().__init__(channels, fingerprint=fingerprint, ttl_s=ttl_s)
        self.gate = Gate()
        self.renewed: asyncio.Queue[LeaseId] = asyncio.Queue()
        """Those that decode workers accepted."""

    async def renew(self, decode: Endpoint, lease_id: LeaseId) -> None:
        await super().renew(decode, lease_id)
        self.renewed.put_nowait(lease_id)

    async def commit(self, action: CommitHandoff) -> tuple[int, ...]:
        await self.gate.pass_through()
        return await super().commit(action)


@dataclass
class ShiftedClock:
    """The worker's clock, which a test can put forward."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s
