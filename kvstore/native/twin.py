"""The structures of `base` in Python, for machines without a C compiler."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvstore.native.base import MAX_RECORDS, NO_RECORD, Allocate, Entry, Record, RecordArray
from kvstore.native.layout import HEADER, check_entry, check_key, check_keys, place_of
from protocol.keys import BlockKey, iter_keys

COMPACT_AT_LEAST = 64
"""Smaller heaps are not worth rebuilding."""
_OBJECT_BYTES = 32
"""Of a number that only its container knows."""


class PythonKeyIndex:
    """`PublishedIndex` that only its owner can read: its memory says that it is none, so others ask."""

    def __init__(self, allocate: Allocate) -> None:
        self.memory = allocate(HEADER.size)
        self._entries: dict[bytes, Entry] = {}

    @property
    def nbytes(self) -> int:
        return sys.getsizeof(self._entries) + len(self._entries) * 8 * _OBJECT_BYTES

    def __len__(self) -> int:
        return len(self._entries)

    def insert(self, key: BlockKey, entry: Entry) -> None:
        check_key(key)
        check_entry(entry)
        place_of(entry.offset)
        assert key not in self._entries, "the key is there already"
        self._entries[key] = entry

    def find(self, key: BlockKey) -> Entry | None:
        check_key(key)
        return self._entries.get(key)

    def record_of(self, key: BlockKey) -> Record:
        entry = self.find(key)
        return NO_RECORD if entry is None else entry.record

    def records_of(self, keys: Sequence[BlockKey]) -> list[Record]:
        return [self.record_of(key) for key in keys]

    def records_in(self, packed_keys: bytes) -> RecordArray:
        count = check_keys(packed_keys)
        return np.fromiter(map(self.record_of, iter_keys(packed_keys)), np.int64, count)

    def relocate(self, key: BlockKey, offset: int | None) -> None:
        check_key(key)
        assert key in self._entries, "the key is not there"
        place_of(offset)
        self._entries[key] = replace(self._entries[key], offset=offset)

    def remove(self, key: BlockKey) -> None:
        check_key(key)
        assert key in self._entries, "the key is not there"
        del self._entries[key]

    def validate(self) -> None:
        """A dictionary is always right."""


class PythonKeyMap:
    """`KeyMap`."""

    def __init__(self) -> None:
        self._values: dict[bytes, int] = {}

    @property
    def nbytes(self) -> int:
        return sys.getsizeof(self._values) + len(self._values) * 3 * _OBJECT_BYTES

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: BlockKey) -> int:
        check_key(key)
        return self._values.get(key, NO_RECORD)

    def put(self, key: BlockKey, value: int) -> None:
        check_key(key)
        if not 0 <= value < MAX_RECORDS:
            raise ValueError(f"{value} is not a number below {MAX_RECORDS}")
        self._values[key] = value

    def pop(self, key: BlockKey) -> int:
        check_key(key)
        return self._values.pop(key, NO_RECORD)


class PythonRankHeap:
    """`RankHeap`: outdated entries of a heap are skipped when they surface, and dropped when they are the majority."""

    def __init__(self) -> None:
        self._ranks: dict[Record, tuple[float, int]] = {}
        self._offered: set[Record] = set()
        self._heap: list[tuple[tuple[float, int], Record]] = []

    @property
    def nbytes(self) -> int:
        containers = (self._ranks, self._offered, self._heap)
        objects = 5 * len(self._ranks) + 2 * len(self._heap)  # a tuple takes two
        return sum(map(sys.getsizeof, containers)) + objects * _OBJECT_BYTES

    def __len__(self) -> int:
        return len(self._offered)

    def __contains__(self, record: object) -> bool:
        return record in self._offered

    def put(self, record: Record, primary: float, secondary: int) -> None:
        self.rank(record, primary, secondary)
        self.offer(record)

    def rank(self, record: Record, primary: float, secondary: int) -> None:
        self._check(record)
        self._ranks[record] = float(primary), secondary
        if record in self._offered:
            self._push(record)

    def rank_all(self, records: RecordArray, secondary: int) -> None:
        for number, record in enumerate(records.tolist(), secondary):
            self.rank(record, 0, number)

    def rank_of(self, record: Record) -> tuple[float, int]:
        return self._ranks[record]

    def offer(self, record: Record) -> None:
        self._check(record)
        assert record in self._ranks, "the record has no rank"
        if record not in self._offered:
            self._offered.add(record)
            self._push(record)

    def discard(self, record: Record) -> None:
        self._check(record)
        self._offered.discard(record)
        self._compact()

    def first(self) -> Record:
        while self._heap:
            rank, record = self._heap[0]
            if record in self._offered and self._ranks[record] == rank:
                return record
            heapq.heappop(self._heap)
        return NO_RECORD

    def _push(self, record: Record) -> None:
        heapq.heappush(self._heap, (self._ranks[record], record))
        self._compact()

    def _compact(self) -> None:
        if len(self._heap) > max(COMPACT_AT_LEAST, 2 * len(self._offered)):
            self._heap = [(self._ranks[record], record) for record in self._offered]
            heapq.heapify(self._heap)

    @staticmethod
    def _check(record: Record) -> None:
        if not 0 <= record < MAX_RECORDS:
            raise ValueError(f"{record} is not a record")
