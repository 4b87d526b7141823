"""LengthAware (Mooncake, FAST'25, table of cache policies): like LFU, but blocks later in their request go first.

Blocks of one count differ in who can use them: a block is used by every prompt that shares its prefix, and the longer
that prefix, the fewer there are. Counts age as LFU's do, since the paper does not say how its own do.
"""

from __future__ import annotations

from kvstore.eviction.lfu import LeastFrequentlyUsed
from kvstore.eviction.order import Rank
from protocol.keys import BlockKey


class LengthAware(LeastFrequentlyUsed):
    """LFU-DA, ties by depth in the chain and only then by recency."""

    name = "length-aware"

    def __init__(self) -> None:
        super().__init__()
        self._depths: dict[BlockKey, int] = {}  # of resident keys; 0 = its chain starts there

    def added(self, key: BlockKey, parent: BlockKey | None) -> None:
        # A parent that is not here yet or not any more leaves the depth unknown; 0 keeps the block longest.
        above = self._depths.get(parent) if parent is not None else None
        self._depths[key] = 0 if above is None else above + 1
        super().added(key, parent)

    def forget(self, key: BlockKey) -> None:
        super().forget(key)
        self._depths.pop(key, None)

    def _rank(self, key: BlockKey, worth: float) -> Rank:
        return (worth, -self._depths[key], self._tick())
