"""KV blocks of one decoding machine, by number: who takes them is somebody else's business. Pure."""

from __future__ import annotations

from typing import Protocol

from traces.simulator.sequence import Sequence


class Blocks(Protocol):
    """What a batch asks of the memory behind it."""

    @property
    def total(self) -> int: ...

    @property
    def free(self) -> int:
        """That can be had now, those with nothing but cached prefixes included."""

    def restore(self, sequence: Sequence, num_blocks: int, headroom: int) -> bool:
        """Gives a sequence without blocks so many, if `headroom` stay free; then `missing` says what to compute."""

    def grow(self, sequence: Sequence, num_blocks: int) -> None:
        """So many more, which are free."""

    def computed(self, sequence: Sequence) -> None:
        """All of the sequence's KV is there."""

    def end(self, sequence: Sequence) -> None:
        """Takes all of its blocks back."""


class CountedBlocks:
    """Blocks that nobody looks into: no prefix is shared."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held = 0

    @property
    def total(self) -> int:
        return self._total

    @property
    def free(self) -> int:
        return self._total - self._held

    def take(self, num_blocks: int) -> None:
        """For whoever is no sequence yet. They are free."""
        assert num_blocks <= self.free, "blocks are given twice"
        self._held += num_blocks

    def give_back(self, num_blocks: int) -> None:
        assert num_blocks <= self._held
        self._held -= num_blocks

    def restore(self, sequence: Sequence, num_blocks: int, headroom: int) -> bool:
        if num_blocks + headroom > self.free:
            return False
        self.grow(sequence, num_blocks)
        sequence.missing = sequence.tokens
        return True

    def grow(self, sequence: Sequence, num_blocks: int) -> None:
        self.take(num_blocks)
        sequence.num_blocks += num_blocks

    def computed(self, sequence: Sequence) -> None:
        pass

    def end(self, sequence: Sequence) -> None:
        self.give_back(sequence.num_blocks)
        sequence.num_blocks = 0
