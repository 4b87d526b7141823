"""What policies share that give each key a rank when it is used: the smallest rank on offer goes first."""

from __future__ import annotations

from kvstore.eviction.order import Order, Rank
from protocol.keys import BlockKey


class Ranked:
    """All of a policy but `added` and `used`, which call `_place`."""

    def __init__(self) -> None:
        self._clock = 0  # counts uses; the last part of most ranks, since it makes them differ
        self._ranks: dict[BlockKey, Rank] = {}  # of every resident key
        self._offered = Order()

    def offer(self, key: BlockKey) -> None:
        if key not in self._offered:
            self._offered.put(key, self._ranks[key])

    def withdraw(self, key: BlockKey) -> None:
        self._offered.discard(key)

    def forget(self, key: BlockKey) -> None:
        self._offered.discard(key)
        self._ranks.pop(key, None)

    def victim(self) -> BlockKey | None:
        return self._offered.first()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _place(self, key: BlockKey, rank: Rank) -> None:
        self._ranks[key] = rank
        if key in self._offered:
            self._offered.put(key, rank)
