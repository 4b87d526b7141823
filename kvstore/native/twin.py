"""The structures of `base` in Python, for machines without a C compiler and as the tests' second opinion.

Its index has the same layout in memory, so that processes with and without a compiler read each other's. Map and heap
are Python's own.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence

import numpy as np

from kvstore.native.base import MAX_RECORDS, NO_RECORD, Entry, Record, RecordArray
from kvstore.native.layout import (
    COUNT_AT,
    HEADER,
    MAX_LOAD,
    RETIRED_AT,
    Fields,
    Geometry,
    check_key,
    check_keys,
    entry_of,
    fields_of,
    is_sealed,
    relocated,
)
from kvstore.native.memory import Allocate, Retire
from kvstore.native.slots import Slots
from protocol.keys import BlockKey, iter_keys

COMPACT_AT_LEAST = 64
"""Smaller heaps are not worth rebuilding."""
_OBJECT_BYTES = 32
"""Of a number that only its container knows."""


class PythonKeyIndex:
    """`PublishedIndex`."""

    def __init__(self, allocate: Allocate, retire: Retire) -> None:
        self._allocate, self._retire = allocate, retire
        self._slots = self._make(Geometry.starting())

    @property
    def memory(self) -> memoryview:
        return self._slots.memory

    @property
    def geometry(self) -> Geometry:
        return self._slots.geometry

    @property
    def nbytes(self) -> int:
        return len(self.memory)

    def __len__(self) -> int:
        return int(HEADER.unpack_from(self.memory)[6])

    def insert(self, key: BlockKey, entry: Entry) -> None:
        fields = fields_of(key, entry)
        slots, at = self._slots, self._slots.search(key)
        assert not slots.used(at), "the key is there already"
        while at == slots.end or len(self) + 1 > slots.geometry.num_slots * MAX_LOAD:
            self._grow()
            slots, at = self._slots, self._slots.search(key)
        slots.turn_version()
        slots.write(at, fields)
        self._count(slots, len(self) + 1)
        slots.turn_version()

    def find(self, key: BlockKey) -> Entry | None:
        fields = self._fields(key)
        return None if fields is None else entry_of(fields)

    def record_of(self, key: BlockKey) -> Record:
        fields = self._fields(key)
        return NO_RECORD if fields is None else fields[3]

    def records_of(self, keys: Sequence[BlockKey]) -> list[Record]:
        return [self.record_of(key) for key in keys]

    def records_in(self, packed_keys: bytes) -> RecordArray:
        count = check_keys(packed_keys)
        return np.fromiter(map(self.record_of, iter_keys(packed_keys)), np.int64, count)

    def relocate(self, key: BlockKey, offset: int | None) -> None:
        slots, at = self._slots, self._place(key)
        moved = relocated(slots.fields(at), offset)
        slots.turn_version()
        slots.write(at, moved)
        slots.turn_version()

    def remove(self, key: BlockKey) -> None:
        slots, at = self._slots, self._place(key)
        slots.turn_version()
        slots.close_hole(at)
        self._count(slots, len(self) - 1)
        slots.turn_version()

    def validate(self) -> None:
        slots = self._slots
        entries = [(at, slots.fields(at)) for at in slots.places() if slots.used(at)]
        assert len(self) == len(entries)
        for at, fields in entries:
            assert is_sealed(fields)
            assert slots.search(BlockKey(fields[0])) == at

    def _fields(self, key: BlockKey) -> Fields | None:
        check_key(key)
        at = self._slots.search(key)
        return self._slots.fields(at) if self._slots.used(at) else None

    def _place(self, key: BlockKey) -> int:
        check_key(key)
        at = self._slots.search(key)
        assert self._slots.used(at), "the key is not there"
        return at

    def _count(self, slots: Slots, count: int) -> None:
        slots.memory[COUNT_AT : COUNT_AT + 8] = count.to_bytes(8, sys.byteorder)

    def _make(self, geometry: Geometry) -> Slots:
        memory = self._allocate(geometry.nbytes)
        memory[: HEADER.size] = geometry.header()
        return Slots(memory, geometry)

    def _grow(self) -> None:
        outgrown = self._slots
        geometry = self._slots.geometry.grown()
        while not self._move(self._make(geometry)):
            geometry = geometry.grown()
        outgrown.memory[RETIRED_AT] = 1
        outgrown.release()
        self._retire(outgrown.memory)

    def _move(self, slots: Slots) -> bool:
        """False when entries would run over its end."""
        for fields in map(self._slots.fields, filter(self._slots.used, self._slots.places())):
            at = slots.search(BlockKey(fields[0]))
            if at == slots.end:
                slots.release()
                self._retire(slots.memory)
                return False
            slots.write(at, fields)
        self._count(slots, len(self))
        self._slots = slots
        return True


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
