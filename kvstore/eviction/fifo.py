"""First in, first out: what was stored longest ago goes first, however often it was read since."""

from __future__ import annotations

from kvstore.eviction.ranked import Ranked
from kvstore.native.base import Record, RecordArray
from protocol.keys import BlockKey


class FirstInFirstOut(Ranked):
    """The line that a policy which looks at uses has to beat."""

    name = "fifo"

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        self._place(record, 0, self._tick())

    def used(self, record: Record) -> None:
        """Changes nothing."""

    def used_all(self, records: RecordArray) -> None:
        """Changes nothing."""
