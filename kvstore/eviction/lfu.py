"""Least frequently used, with counts that age; among equals, what was used longest ago goes first.

Plain counts never fall, so what was popular yesterday would stay for ever. Dynamic ageing (LFU-DA; Arlitt, Cherkasova,
Dilley, Friedrich, Jin: "Evaluating content management techniques for Web proxy caches", 2000) ages everything
at once without touching it: a key's worth is its count plus the worth of the last victim at its last use, so that new
keys catch up with old counts at the pace of eviction.
"""

from __future__ import annotations

from collections import Counter

from kvstore.eviction.order import Rank
from kvstore.eviction.ranked import Ranked
from protocol.keys import BlockKey


class LeastFrequentlyUsed(Ranked):
    """LFU-DA."""

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._num_uses: Counter[BlockKey] = Counter()  # of resident keys
        self._age = 0.0  # worth of the last victim
        self._named: BlockKey | None = None  # the victim, until it is gone

    def added(self, key: BlockKey, parent: BlockKey | None) -> None:
        self.used(key)

    def used(self, key: BlockKey) -> None:
        self._num_uses[key] += 1
        self._place(key, self._rank(key, self._age + self._num_uses[key]))

    def victim(self) -> BlockKey | None:
        self._named = super().victim()
        return self._named

    def forget(self, key: BlockKey) -> None:
        if key == self._named:
            # A parent may have become worthless long before its followers left: ages never fall.
            self._age = max(self._age, self._ranks[key][0])
            self._named = None
        self._num_uses.pop(key, None)
        super().forget(key)

    def _rank(self, key: BlockKey, worth: float) -> Rank:
        """Begins with the worth."""
        return (worth, self._tick())
