"""The blocks of one pool as runs of neighbours: which are free, and which ones somebody gets.

Its rule: neighbours stay neighbours where that costs nothing. Who grows gets the blocks right behind its last one as
far as they are free; what else is wanted comes from the smallest free run that has it all, or else from the largest
ones. O(log runs) per run taken or given back. Does not know who holds what; sequences, tokens and policies.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from engine.block_runs import runs_of
from protocol.ids import BlockId


class BlockSpace:
    """Free runs by their two ends and by length. Runs are half-open."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._ends = {0: num_blocks}  # begin → end of a free run
        self._begins = {num_blocks: 0}  # end → begin
        self._lengths = [(num_blocks, 0)]  # (length, begin), sorted
        self._taken = bytearray(num_blocks)

    @property
    def num_free_runs(self) -> int:
        return len(self._lengths)

    @property
    def largest_run(self) -> int:
        """Blocks in it; 0 when none is free."""
        return self._lengths[-1][0] if self._lengths else 0

    def take(self, count: int, after: BlockId | None = None) -> list[BlockId] | None:
        """`count` blocks in few runs, those behind `after` first; None and no change when fewer are free."""
        if count > self.num_free:
            return None
        found: list[BlockId] = []
        if after is not None and after + 1 in self._ends:
            found += self._cut(after + 1, count)
        while len(found) < count:
            missing = count - len(found)
            at = bisect_left(self._lengths, (missing, 0))
            _, begin = self._lengths[min(at, len(self._lengths) - 1)]
            found += self._cut(begin, missing)
        return found

    def give(self, blocks: Sequence[BlockId]) -> None:
        """These are free again. Raises ValueError, and changes nothing, when one of them is not taken."""
        if not all(0 <= block < self.num_blocks and self._taken[block] for block in blocks):
            raise ValueError("a block that is not taken cannot be given back")
        if len(set(blocks)) < len(blocks):
            raise ValueError("a block cannot be given back twice")
        for begin, end in runs_of(blocks):
            self._free(begin, end)

    def _cut(self, begin: BlockId, most: int) -> range:
        """The first blocks of the free run that begins there, at most so many."""
        end = self._ends[begin]
        until = min(begin + most, end)
        self._remove(begin, end)
        if until < end:
            self._add(until, end)
        self._taken[begin:until] = b"\1" * (until - begin)
        self.num_free -= until - begin
        return range(begin, until)

    def _free(self, begin: BlockId, end: BlockId) -> None:
        self._taken[begin:end] = bytes(end - begin)
        self.num_free += end - begin
        before = self._begins.get(begin)
        if before is not None:
            self._remove(before, begin)
            begin = before
        behind = self._ends.get(end)
        if behind is not None:
            self._remove(end, behind)
            end = behind
        self._add(begin, end)

    def _add(self, begin: BlockId, end: BlockId) -> None:
        self._ends[begin] = end
        self._begins[end] = begin
        insort(self._lengths, (end - begin, begin))

    def _remove(self, begin: BlockId, end: BlockId) -> None:
        del self._ends[begin], self._begins[end]
        del self._lengths[bisect_left(self._lengths, (end - begin, begin))]

    # -- proof

    def is_taken(self, block: BlockId) -> bool:
        return bool(self._taken[block])

    def validate(self) -> None:
        """Raises AssertionError unless the free runs are exactly the blocks that nobody has, none beside another."""
        free = {block for begin, end in self._ends.items() for block in range(begin, end)}
        assert free == {b for b in range(self.num_blocks) if not self._taken[b]}, "a block is lost"
        assert len(free) == self.num_free, "the count of free blocks drifted"
        assert self._begins == {end: begin for begin, end in self._ends.items()}, "ends disagree"
        assert not self._begins.keys() & self._ends.keys(), "two free runs touch"
        lengths = sorted((end - begin, begin) for begin, end in self._ends.items())
        assert lengths == self._lengths, "runs by length drifted"
