"""Records when a prompt was loaded and computed: subclasses and wrappers of the product's engine and store client.

Times are seconds of `time.perf_counter`; after `since`, they count from the prompt's arrival.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.batch import Sampled, Slice
from engine.runtime import EngineThread
from kvstore.client.blocks import BlockStores
from kvstore.client.objects import ReadLease
from kvstore.client.spots import Spots
from protocol.keys import BlockKey
from protocol.request import Endpoint
from protocol.rpc import Channels
from transfer import Batch, Op, ScatterTransfer, TransferEngine, scatter
from transfer.plan import AnyTransfer

Span = tuple[float, float]


@dataclass(slots=True)
class Record:
    """Time spans of one prompt's leases, reads, checks, steps, pauses and sends."""

    leases: list[Span] = field(default_factory=list)
    turns: list[Span] = field(default_factory=list)  # reads of all layers or of some
    checks: list[Span] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)
    pauses: list[Span] = field(default_factory=list)  # waits between a layer's projection and its attention
    sends: list[Span] = field(default_factory=list)  # to a decode worker

    def clear(self) -> None:
        for spans in (self.leases, self.turns, self.checks, self.steps, self.pauses, self.sends):
            spans.clear()

    def since(self, began_at: float) -> Record:
        """Returns a copy with times counted from `began_at`."""

        def moved(spans: Sequence[Span]) -> list[Span]:
            return [(begin - began_at, end - began_at) for begin, end in spans]

        return Record(
            moved(self.leases),
            moved(self.turns),
            moved(self.checks),
            moved(self.steps),
            moved(self.pauses),
            moved(self.sends),
        )

    @property
    def load(self) -> Span | None:
        """Span from the first request for a lease to the last verified block; None if nothing was loaded."""
        spans = [*self.leases, *self.turns, *self.checks]
        return (min(b for b, _ in spans), max(e for _, e in spans)) if spans else None

    @property
    def load_s(self) -> float:
        return self.load[1] - self.load[0] if self.load else 0.0

    @property
    def compute_s(self) -> float:
        return _length(self.steps) - _length(self.pauses)

    @property
    def hidden_share(self) -> float:
        """Share of the load time in which the engine computed."""
        if self.load is None:
            return 0.0
        beside = _overlap(self.steps, self.load) - _overlap(self.pauses, self.load)
        return beside / self.load_s


def _length(spans: Sequence[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _overlap(spans: Sequence[Span], other: Span) -> float:
    return sum(max(min(end, other[1]) - max(begin, other[0]), 0.0) for begin, end in spans)


class RecordedTransfer(TransferEngine):
    """Transfer engine that records its writes."""

    record: Record | None = None

    def submit(self, transfers: Sequence[AnyTransfer], *, deadline_s: float) -> Batch:
        began_at = time.perf_counter()
        batch = super().submit(transfers, deadline_s=deadline_s)
        record = self.record
        if record is not None and transfers[0].op is Op.WRITE:
            batch.add_done_callback(lambda _: record.sends.append((began_at, time.perf_counter())))
        return batch


class RecordedEngine:
    """Wraps an engine thread and records its steps and pauses."""

    def __init__(self, thread: EngineThread, record: Record) -> None:
        self._thread = thread
        self._record = record

    async def execute(
        self,
        slices: Sequence[Slice],
        on_layer: Callable[[int], None] | None = None,
        *,
        before_attention: Callable[[int], None] | None = None,
        **more: Any,
    ) -> list[Sampled | None]:
        def watched(layer: int) -> None:
            began_at = time.perf_counter()
            try:
                for hook in (on_layer, before_attention):
                    if hook is not None:
                        hook(layer)
            finally:
                self._record.pauses.append((began_at, time.perf_counter()))

        began_at = time.perf_counter()
        try:
            return await self._thread.execute(slices, watched, **more)
        finally:
            self._record.steps.append((began_at, time.perf_counter()))


class RecordedStores(BlockStores):
    """Store client that records leases, reads and checks, and delays reads to the rate `bytes_per_s`."""

    def __init__(self, channels: Channels, transfer: TransferEngine, record: Record) -> None:
        super().__init__(channels, transfer)
        self._record = record
        self.bytes_per_s: float | None = None

    async def lease(
        self,
        store: Endpoint,
        keys: Sequence[BlockKey],
        *,
        ttl_s: float = 10.0,
        timeout_s: float = 2.0,
    ) -> ReadLease:
        began_at = time.perf_counter()
        lease = await super().lease(store, keys, ttl_s=ttl_s, timeout_s=timeout_s)
        self._record.leases.append((began_at, time.perf_counter()))
        return lease

    async def transfer(self, lease: ReadLease, transfer: ScatterTransfer, *, deadline_s: float) -> None:
        began_at = time.perf_counter()
        await super().transfer(lease, transfer, deadline_s=deadline_s)
        await self._arrived(began_at, scatter.total(transfer.rows))

    async def read(self, store: Endpoint, keys: Sequence[BlockKey], spots: Spots, *, deadline_s: float) -> list[int]:
        began_at = time.perf_counter()
        checksums = await super().read(store, keys, spots, deadline_s=deadline_s)
        await self._arrived(began_at, spots.nbytes)
        return checksums

    async def _arrived(self, began_at: float, nbytes: int) -> None:
        if self.bytes_per_s is not None:
            arrives_at = began_at + nbytes / self.bytes_per_s
            await asyncio.sleep(max(arrives_at - time.perf_counter(), 0.0))
        self._record.turns.append((began_at, time.perf_counter()))

    async def verify(self, lease: ReadLease, spots: Spots) -> int:
        began_at = time.perf_counter()
        num_good = await super().verify(lease, spots)
        self._record.checks.append((began_at, time.perf_counter()))
        return num_good
