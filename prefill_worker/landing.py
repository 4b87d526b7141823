"""From blocks to bytes: which ranges of the own pool go to which ranges of a target's, and their checksums.

The hot path: `StepWriter.on_layer` runs in the engine's thread after every layer. So everything that does not depend on
the layer is worked out before the step, blocks that are neighbours in both pools become one range, and what a sequence
sends leaves in batches that are worth their fixed cost: one per layer where layers are large, several layers together
where they are small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from prefill_worker.actions import SlicePlan
from prefill_worker.events import Landing
from protocol.checksum import RunningChecksum
from protocol.errors import MoonserveError
from protocol.ids import BlockId
from protocol.layout import KvLayout
from transfer import Batch, Op, RemoteSegment, Segment, Transfer

Submit = Callable[[Sequence[Transfer]], Batch]

# Submitting a batch takes about a millisecond of Python in this process, the time of copying some megabytes. With
# fewer bytes per batch a small model's prefill would wait for its own sending (LOG.md).
MIN_BATCH_BYTES = 2 << 20

Run = tuple[int, int, int]
"""(own offset, target's offset, length) within any piece; whole blocks or parts of them."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The own pool: a registered segment, laid out as `protocol.layout` says."""

    segment: Segment
    layout: KvLayout
    num_blocks: int

    @property
    def piece_stride(self) -> int:
        """From one piece of a block to the next."""
        return self.num_blocks * self.layout.piece_bytes

    def pieces_of(self, block: BlockId) -> tuple[tuple[int, int], ...]:
        """(offset, length) of all pieces of a block, in the order of a stored object."""
        length = self.layout.piece_bytes
        start = block * length
        return tuple(
            (start + piece * self.piece_stride, length)
            for piece in range(self.layout.pieces_per_block)
        )


class Route:
    """The way of some token ranges of one sequence into its landing, for any piece."""

    __slots__ = ("_local", "_local_stride", "_remote", "_remote_stride", "_runs", "_window_id")

    def __init__(self, memory: KvMemory, landing: Landing, runs: Sequence[Run]) -> None:
        self._local = memory.segment
        self._local_stride = memory.piece_stride
        self._remote = RemoteSegment(landing.transfer_address, landing.segment_id)
        self._remote_stride = landing.num_blocks * memory.layout.piece_bytes
        self._window_id = landing.window_id
        self._runs = runs

    @property
    def piece_bytes(self) -> int:
        """Bytes that one piece sends."""
        return sum(length for _, _, length in self._runs)

    def transfers(self, pieces: range) -> list[Transfer]:
        """The writes of these pieces (2·layer for K, 2·layer + 1 for V)."""
        return [
            Transfer(
                Op.WRITE,
                self._local,
                own + piece * self._local_stride,
                self._remote,
                target + piece * self._remote_stride,
                length,
                self._window_id,
            )
            for piece in pieces
            for own, target, length in self._runs
        ]


def block_runs(pairs: Sequence[tuple[BlockId, BlockId]], layout: KvLayout) -> list[Run]:
    """Whole blocks, given as (own, target's)."""
    length = layout.piece_bytes
    return _coalesced([(own * length, target * length, length) for own, target in pairs])


def token_runs(
    table: Sequence[BlockId], target: Sequence[BlockId], start: int, end: int, layout: KvLayout
) -> list[Run]:
    """The tokens [start, end) of a sequence."""
    size, token_bytes = layout.block_size, layout.token_bytes
    runs: list[Run] = []
    for index in range(start // size, layout.blocks_for(end)):
        first = max(start - index * size, 0)
        last = min(end - index * size, size)
        offset = first * token_bytes
        own, there = (
            block * layout.piece_bytes + offset for block in (table[index], target[index])
        )
        runs.append((own, there, (last - first) * token_bytes))
    return _coalesced(runs)


def _coalesced(runs: Sequence[Run]) -> list[Run]:
    """Runs that are adjacent on both sides, joined."""
    joined: list[Run] = []
    for own, target, length in runs:
        if joined:
            last_own, last_target, last_length = joined[-1]
            if (last_own + last_length, last_target + last_length) == (own, target):
                joined[-1] = (last_own, last_target, last_length + length)
                continue
        joined.append((own, target, length))
    return joined


class StepWriter:
    """Sends what a step computes, layer by layer, and takes the checksums of the blocks it completes.

    One object per step. A block's checksum covers its pieces K0 V0 K1 V1 …, which is the order in which layers finish,
    so it grows with them while the bytes are still in the processor's cache.
    """

    def __init__(self, memory: KvMemory, plans: Sequence[SlicePlan], submit: Submit) -> None:
        self._memory = memory
        self._submit = submit
        self._sent = [_SentSlice(memory, plan) for plan in plans]
        self._sums = [_BlockSum(memory, plan, index) for plan in plans for index in plan.complete]
        self._num_sums = [len(plan.complete) for plan in plans]

    def on_layer(self, layer: int) -> None:
        """Called in the engine's thread. Raises nothing: a write that cannot start is that slice's failure."""
        pieces = range(2 * layer, 2 * layer + 2)
        for sent in self._sent:
            sent.add(pieces)
            if sent.num_pending_bytes >= MIN_BATCH_BYTES:
                sent.submit(self._submit)
        buffer, stride = self._memory.segment.buffer, self._memory.piece_stride
        for piece in pieces:
            for block in self._sums:
                start = block.start + piece * stride
                block.checksum.add(buffer[start : start + block.length])

    def checksums(self) -> list[tuple[tuple[int, int], ...]]:
        """Per plan: (index in the block table, checksum) of each completed block. After the last layer."""
        sums = iter(self._sums)
        return [
            tuple((entry.index, entry.checksum.value) for entry in islice(sums, count))
            for count in self._num_sums
        ]

    def finish(self) -> None:
        """Sends what is left, after the step."""
        for sent in self._sent:
            sent.submit(self._submit)

    async def sent(self, position: int) -> None:
        """Waits until no write of the plan at `position` is under way, after `finish`. Raises the first error."""
        sent = self._sent[position]
        await all_done(sent.batches)
        if sent.error is not None:
            raise sent.error


class _SentSlice:
    """The writes of one slice."""

    __slots__ = ("_pending", "_piece_bytes", "_route", "batches", "error", "num_pending_bytes")

    def __init__(self, memory: KvMemory, plan: SlicePlan) -> None:
        self.batches: list[Batch] = []
        self.error: MoonserveError | None = None
        self.num_pending_bytes = 0
        self._pending: list[Transfer] = []
        self._route: Route | None = None
        if plan.landing is not None:
            table, target = plan.slice.block_table, plan.landing.block_ids
            runs = token_runs(table, target, plan.send_from, plan.slice.end, memory.layout)
            self._route = Route(memory, plan.landing, runs)
            self._piece_bytes = self._route.piece_bytes

    def add(self, pieces: range) -> None:
        """These pieces are in the pool now."""
        if self._route is not None and self.error is None:
            self._pending += self._route.transfers(pieces)
            self.num_pending_bytes += len(pieces) * self._piece_bytes

    def submit(self, submit: Submit) -> None:
        """Sends what has been added. Raises nothing: a write that cannot start is this slice's failure."""
        pending, self._pending, self.num_pending_bytes = self._pending, [], 0
        if not pending:
            return
        try:
            self.batches.append(submit(pending))
        except MoonserveError as error:
            self.error = error


class _BlockSum:
    """The checksum of one block over its valid tokens."""

    __slots__ = ("checksum", "index", "length", "start")

    def __init__(self, memory: KvMemory, plan: SlicePlan, index: int) -> None:
        layout = memory.layout
        num_tokens = min(layout.block_size, plan.slice.end - index * layout.block_size)
        self.index = index
        self.start = plan.slice.block_table[index] * layout.piece_bytes
        self.length = num_tokens * layout.token_bytes
        self.checksum = RunningChecksum()


async def all_done(batches: Sequence[Batch]) -> None:
    """Waits for all of them, also after one failed: their source must not change before. Raises the first error."""
    first_error: MoonserveError | None = None
    for batch in batches:
        try:
            await batch
        except MoonserveError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
