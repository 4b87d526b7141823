"""Least recently used: what was used longest ago goes first."""

from __future__ import annotations

from kvstore.eviction.ranked import Ranked
from kvstore.native.base import Record, RecordArray
from protocol.keys import BlockKey


class LeastRecentlyUsed(Ranked):
    """Right when the chance of another use falls with the time since the last one."""

    name = "lru"

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        self.used(record)

    def used(self, record: Record) -> None:
        self._place(record, 0, self._tick())

    def used_all(self, records: RecordArray) -> None:
        self._ranks.rank_all(records, self._clock + 1)
        self._clock += len(records)
