"""Least recently used: what was used longest ago goes first."""

from __future__ import annotations

from kvstore.eviction.ranked import Ranked
from protocol.keys import BlockKey


class LeastRecentlyUsed(Ranked):
    """Right when the chance of another use falls with the time since the last one."""

    name = "lru"

    def added(self, key: BlockKey, parent: BlockKey | None) -> None:
        self.used(key)

    def used(self, key: BlockKey) -> None:
        self._place(key, (self._tick(),))
