"""How many resident blocks name each block as their parent, whether that one is resident or not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore.native.base import NO_RECORD, KeyIndex, Record
from kvstore.records import Records
from protocol.keys import BlockKey


class Followers:
    """Counts in the rows of visible blocks; apart from them for parents that are absent or still being written."""

    def __init__(self, rows: Records, index: KeyIndex) -> None:
        self._rows = rows
        self._index = index
        self._of_absent: dict[BlockKey, tuple[int, int]] = {}  # in all, in memory

    def count(
        self,
        parent: BlockKey | None,
        change: int,
        change_in_memory: int,
        changed: Callable[[Record], None],
    ) -> None:
        """So many more (or fewer) blocks follow `parent`; `changed` is told its record when it is visible."""
        if parent is None:
            return
        record = self._index.record_of(parent)
        if record == NO_RECORD:
            total, in_memory = self._of_absent.get(parent, (0, 0))
            self._set_absent(parent, total + change, in_memory + change_in_memory)
            return
        self._rows.followers[record] += change
        self._rows.followers_in_memory[record] += change_in_memory
        changed(record)

    def arrive(self, key: BlockKey, record: Record) -> None:
        """`key` becomes visible as `record`, whose row is new."""
        total, in_memory = self._of_absent.pop(key, (0, 0))
        self._rows.followers[record] = total
        self._rows.followers_in_memory[record] = in_memory

    def leave(self, key: BlockKey, record: Record) -> None:
        """`key` is no longer visible; its row still stands."""
        total, in_memory = self._rows.followers[record], self._rows.followers_in_memory[record]
        self._set_absent(key, total, in_memory)

    def _set_absent(self, key: BlockKey, total: int, in_memory: int) -> None:
        if total:
            self._of_absent[key] = (total, in_memory)
        else:
            self._of_absent.pop(key, None)

    def validate(self, expected: Iterable[tuple[BlockKey, bool]]) -> None:
        """Raises AssertionError unless exactly these blocks (parent, in memory) are counted."""
        counts: dict[BlockKey, tuple[int, int]] = {}
        for parent, in_memory in expected:
            total, among = counts.get(parent, (0, 0))
            counts[parent] = (total + 1, among + in_memory)
        for parent, counted in counts.items():
            record = self._index.record_of(parent)
            if record == NO_RECORD:
                assert self._of_absent.get(parent) == counted, "followers of an absent block"
            else:
                rows = self._rows
                assert (rows.followers[record], rows.followers_in_memory[record]) == counted
        absent = {key for key in counts if self._index.record_of(key) == NO_RECORD}
        assert set(self._of_absent) == absent
