"""Where a pool's blank blocks come from. The stack: all are there, always; `engine.elastic.paged_blanks`: only those of
pages that may take memory now.

Does not know who holds the blocks that are out, nor what they cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from protocol.ids import BlockId


class Blanks(Protocol):
    """Blocks are taken when somebody is about to hold them and put back when nothing is in them that counts."""

    @property
    def num_ready(self) -> int:
        """Blocks that `take` gives now."""

    @property
    def num_in_reach(self) -> int:
        """Those, and what `prepare` could make ready, as far as is known."""

    @property
    def capacity(self) -> int:
        """Blocks that can be out at once, as limits are now: what needs more never fits."""

    @property
    def is_leaving(self) -> bool:
        """Whether `choose_leaving` has something to choose, or something that was chosen is not blank yet."""

    def prepare(self, count: int) -> None:
        """So many are about to be taken: makes them ready, as far as that is possible at once."""

    def want(self, count: int) -> None:
        """Somebody waits for so many blocks, beyond what is in reach."""

    def take(self, count: int) -> list[BlockId]:
        """Of which so many are ready."""

    def put(self, block: BlockId) -> None: ...

    def keep_only(self, taken: Collection[BlockId]) -> None:
        """All but these are blank, whatever was taken before."""

    def choose_leaving(self, references: Sequence[int]) -> Collection[BlockId]:
        """Blocks that are to become blank, and then are out of reach, since there is less memory. `references`: of each
        block."""

    def __iter__(self) -> Iterator[BlockId]:
        """Every blank block, in reach or not."""


class Stack:
    """All blocks of a pool whose memory is there for good; low ids come first."""

    is_leaving = False

    def __init__(self, num_blocks: int) -> None:
        self.capacity = num_blocks
        self._blocks = array("I", range(num_blocks - 1, -1, -1))

    @property
    def num_ready(self) -> int:
        return len(self._blocks)

    num_in_reach = num_ready

    def prepare(self, count: int) -> None:
        """They are."""

    def want(self, count: int) -> None:
        """There will never be more."""

    def take(self, count: int) -> list[BlockId]:
        blocks = self._blocks
        return [BlockId(blocks.pop()) for _ in range(count)]

    def put(self, block: BlockId) -> None:
        self._blocks.append(block)

    def keep_only(self, taken: Collection[BlockId]) -> None:
        self._blocks = array("I", (b for b in range(self.capacity - 1, -1, -1) if b not in taken))

    def choose_leaving(self, references: Sequence[int]) -> Collection[BlockId]:
        return ()

    def __iter__(self) -> Iterator[BlockId]:
        return map(BlockId, self._blocks)
