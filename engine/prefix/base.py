"""What a block pool asks of the index of its findable blocks.

The pool counts references; the index is told when a block's first one comes and its last one goes, and orders those
without. A block is *idle* while it is findable and nobody holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from protocol.ids import BlockId
from protocol.keys import BlockKey


class PrefixIndex(Protocol):
    """The findable blocks of a pool. It tells whoever made it of every block that becomes findable or ceases to be."""

    def __len__(self) -> int:
        """Findable blocks."""

    @property
    def num_idle(self) -> int: ...

    def is_findable(self, block: BlockId) -> bool: ...

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """The longest run of leading blocks that are findable; `keys` is a chain."""

    def add(
        self, block: BlockId, key: BlockKey, parent: BlockKey, checksum: int, *, hits: int = 0
    ) -> bool:
        """Makes a held block findable. False and no change when the key is findable already. Its parent may come later
        or never; NO_PARENT never comes. Raises ValueError when the block can be found under another key."""

    def key_of(self, block: BlockId) -> BlockKey | None: ...

    def checksum_of(self, block: BlockId) -> int | None: ...

    def hits_of(self, block: BlockId) -> int:
        """How often it was found since it was added, up to MAX_HITS; 0 when it is not findable."""

    def hit(self, blocks: Iterable[BlockId]) -> None:
        """These findable blocks were found by somebody who uses them."""

    def hold(self, block: BlockId) -> None:
        """A findable block that was idle is not any more."""

    def let_go(self, block: BlockId) -> None:
        """A findable block that was held is idle from now on, and was used until now."""

    def evict(self, count: int) -> list[BlockId]:
        """Takes at least `count` idle blocks out, of which there are so many. A block goes before the block it
        extends; where that one is held, it is taken out along with it but not among those returned."""

    def remove(self, block: BlockId) -> list[BlockId]:
        """Takes a findable block and all that extend it out; returns the idle ones of them."""

    def by_age(self) -> list[BlockId]:
        """Every findable block: idle ones, what would go first first, then held ones, ends of chains first."""

    def items(self) -> Iterator[tuple[BlockKey, BlockKey, BlockId]]:
        """(key, parent, block) of every findable block, parents first."""

    def validate(self) -> None:
        """Raises AssertionError when the bookkeeping is broken. O(n)."""


MAX_HITS = 255
"""What a byte counts."""
