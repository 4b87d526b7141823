"""LengthAware (Mooncake, FAST'25, table of cache policies): like LFU, but blocks later in their request go first.

Blocks of one count differ in who can use them: a block is used by every prompt that shares its prefix, and the longer
that prefix, the fewer there are. Counts age as LFU's do, since the paper does not say how its own do.
"""

from __future__ import annotations

from kvstore.eviction.columns import Column
from kvstore.eviction.lfu import LeastFrequentlyUsed
from kvstore.native.base import Record
from protocol.keys import BlockKey

MAX_DEPTH = 2**20 - 1
"""Deeper ones count as this deep."""
TICKS = 2**44
"""The rest of a rank's 64 bits: five years at 100,000 uses a second."""


class LengthAware(LeastFrequentlyUsed):
    """LFU-DA, ties by depth in the chain and only then by recency."""

    name = "length-aware"

    def __init__(self) -> None:
        super().__init__()
        self._depths = Column("I")  # of residents; 1 = the head of its chain, 0 = not resident

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        # A parent that is not here yet or not any more leaves the depth unknown; 1 keeps the block longest.
        self._depths[record] = min(self._depths[parent] + 1, MAX_DEPTH)
        super().added(record, key, parent)

    def forget(self, record: Record) -> None:
        super().forget(record)
        self._depths[record] = 0

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._depths.nbytes

    def _tie(self, record: Record) -> int:
        return (MAX_DEPTH - self._depths[record]) * TICKS + self._tick() % TICKS
