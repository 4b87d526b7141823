"""Index of a node's objects, and heaps of its eviction policies: Python owns the memory, C changes it.

Its rule: Python checks the bounds of all memory whose address is passed to C, and keeps it alive. Knows no readers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.native.base import (
    MAX_RECORDS,
    NO_RECORD,
    Allocate,
    Entry,
    Record,
    RecordArray,
    Retire,
    anonymous,
    dropped,
)
from kvstore.native.layout import (
    HEADER,
    SLOT,
    Geometry,
    check_entry,
    check_key,
    check_keys,
    entry_of,
    place_of,
)
from kvstore.native.prototypes import HeapState, Table, heap_library, metadata_library
from protocol.keys import KEY_BYTES, BlockKey, pack_keys
from transfer.native import address_of


def table_over(memory: memoryview, geometry: Geometry) -> Table:
    """Returns the C structure of an index. The caller keeps `memory` alive."""
    at = address_of(memory)
    return Table(at, at + HEADER.size, geometry.num_slots, geometry.num_all, geometry.seed)


class KeyIndex:
    """Hash table of visible objects by key. Other processes map or READ its memory while the owner changes it.

    The owner is one thread. Readers see each entry as it was before or after a change, never in between. Mapped readers
    find every entry that is present throughout their search; a one-sided READ may miss it, and then asks the owner.
    """

    def __init__(self, allocate: Allocate = anonymous, retire: Retire = dropped) -> None:
        """Takes memory from `allocate` and passes outgrown memory to `retire`. Raises CompilerError."""
        self._library = metadata_library()
        self._allocate, self._retire = allocate, retire
        self._found = ctypes.create_string_buffer(SLOT.size)
        self._one = (ctypes.c_int64 * 1)()
        self._settle(*self._make(Geometry.starting()))

    @property
    def memory(self) -> memoryview:
        """Memory that peers map or READ. It changes when the index grows."""
        return self._memory

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return len(self._memory)

    def __len__(self) -> int:
        return int(HEADER.unpack_from(self._memory)[6])

    def insert(self, key: BlockKey, entry: Entry) -> None:
        """Inserts `key`, which must be absent. May move the index to larger memory."""
        check_key(key)
        check_entry(entry)
        fields = entry.checksum, entry.generation, entry.record, place_of(entry.offset)
        while not (done := self._library.index_insert(self._at, key, *fields, entry.length)):
            self._grow()
        assert done > 0, "the key is there already"

    def find(self, key: BlockKey) -> Entry | None:
        check_key(key)
        if not self._library.index_find(self._at, key, self._found):
            return None
        return entry_of(SLOT.unpack(self._found))

    def record_of(self, key: BlockKey) -> Record:
        """Returns the record of `key`; NO_RECORD if it is absent."""
        check_key(key)
        self._library.index_records(self._at, key, 1, self._one)
        return self._one[0]

    def records_of(self, keys: Sequence[BlockKey]) -> list[Record]:
        """Returns the record of each key, NO_RECORD for absent ones. One call of C for many keys."""
        packed = pack_keys(keys)
        if len(packed) != len(keys) * KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes")
        records = (ctypes.c_int64 * len(keys))()
        self._library.index_records(self._at, packed, len(keys), records)
        return records[:]

    def records_in(self, packed_keys: bytes) -> RecordArray:
        """Returns the record of each packed key, like `records_of`, but without the GIL."""
        count = check_keys(packed_keys)
        records = np.empty(count, np.int64)
        self._library.index_records_unlocked(self._at, packed_keys, count, address_of(records))
        return records

    def relocate(self, key: BlockKey, offset: int | None) -> None:
        """Changes the offset of `key`, which must be present. Readers that are copying from the old place notice it."""
        check_key(key)
        found = self._library.index_relocate(self._at, key, place_of(offset))
        assert found, "the key is not there"

    def remove(self, key: BlockKey) -> None:
        """Removes `key`, which must be present. Readers that start later do not find it; readers that are copying it
        notice."""
        check_key(key)
        found = self._library.index_remove(self._at, key)
        assert found, "the key is not there"

    def validate(self) -> None:
        """Raises AssertionError unless every entry can be found and the count is right."""
        assert self._library.index_check(self._at) == len(self)

    def _make(self, geometry: Geometry) -> tuple[memoryview, Geometry]:
        memory = self._allocate(geometry.nbytes)
        memory[: HEADER.size] = geometry.header()
        return memory, geometry

    def _settle(self, memory: memoryview, geometry: Geometry) -> None:
        self._memory, self._geometry = memory, geometry
        self._table = table_over(memory, geometry)
        self._at = ctypes.addressof(self._table)

    def _grow(self) -> None:
        old, old_table = self._memory, self._table
        geometry = self._geometry.grown()
        while not self._move(*self._make(geometry)):
            geometry = geometry.grown()
        self._library.index_retire(ctypes.addressof(old_table))
        self._retire(old)

    def _move(self, memory: memoryview, geometry: Geometry) -> bool:
        """Moves all entries to larger memory. Returns False if entries would run over its end."""
        table = table_over(memory, geometry)
        if not self._library.index_move(ctypes.addressof(table), self._at):
            self._retire(memory)
            return False
        self._settle(memory, geometry)
        return True


_MIN_ROOM = 64
Number = TypeVar("Number", bound=np.generic)


class RankHeap:
    """Binary heap of records by rank. The ranks are in columns indexed by record. Changes cost O(log n).

    A rank is (primary, secondary); the smallest is first. A record keeps its rank while it is not in the heap.
    Primaries take no memory while all of them are 0.
    """

    def __init__(self) -> None:
        """Creates an empty heap. Raises CompilerError."""
        self._library = heap_library()
        self._records = np.zeros(0, np.uint32)
        self._positions = np.zeros(0, np.uint32)
        self._secondaries = np.zeros(0, np.uint64)
        self._primaries: npt.NDArray[np.float64] | None = None  # allocated for the first that is not 0
        self._heap = HeapState()
        self._at = ctypes.addressof(self._heap)

    @property
    def nbytes(self) -> int:
        primaries = 0 if self._primaries is None else self._primaries.nbytes
        return self._records.nbytes + self._positions.nbytes + self._secondaries.nbytes + primaries

    def __len__(self) -> int:
        return int(self._heap.count)

    def rank(self, record: Record, primary: float, secondary: int) -> None:
        """Sets the rank of a record, whether it is in the heap or not."""
        check_record(record)
        while not self._library.heap_rank(self._at, record, primary, secondary):
            self._widen(record, primary)

    def rank_all(self, records: RecordArray, secondary: int) -> None:
        """Sets the ranks of many records, in order: primary 0, secondaries counted up from `secondary`. A record may
        occur twice. Runs without the GIL."""
        if not len(records):
            return
        check_record(int(records.min()))
        check_record(highest := int(records.max()))
        if highest >= self._heap.num_records:
            self._widen(highest, 0.0)
        records = np.ascontiguousarray(records)
        self._library.heap_rank_all(self._at, address_of(records), len(records), secondary)

    def rank_of(self, record: Record) -> tuple[float, int]:
        """Returns the rank of a record that was ranked before."""
        primary = 0.0 if self._primaries is None else float(self._primaries[record])
        return primary, int(self._secondaries[record])

    def offer(self, record: Record) -> None:
        """Adds a ranked record to the heap; no-op if it is there."""
        check_record(record)
        while not (done := self._library.heap_offer(self._at, record)):
            self._records = longer(self._records, len(self._records) + 1)
            self._heap.records, self._heap.room = address_of(self._records), len(self._records)
        assert done > 0, "the record has no rank"

    def discard(self, record: Record) -> None:
        """Removes a record from the heap; no-op if it is absent."""
        check_record(record)
        self._library.heap_discard(self._at, record)

    def first(self) -> Record:
        """Returns the record with the smallest rank; NO_RECORD if the heap is empty."""
        return int(self._records[0]) if self._heap.count else NO_RECORD

    def _widen(self, record: Record, primary: float) -> None:
        if record >= len(self._positions):
            self._positions = longer(self._positions, record + 1)
            self._secondaries = longer(self._secondaries, record + 1)
        num_records = len(self._positions)
        if primary and self._primaries is None:
            self._primaries = np.zeros(num_records, np.float64)
        if self._primaries is not None:
            if len(self._primaries) < num_records:
                self._primaries = longer(self._primaries, record + 1)
            self._heap.primaries = address_of(self._primaries)
        self._heap.positions = address_of(self._positions)
        self._heap.secondaries = address_of(self._secondaries)
        self._heap.num_records = num_records


def check_record(record: Record) -> None:
    """Raises ValueError for a number out of range, which C would take modulo 2**32."""
    if not 0 <= record < MAX_RECORDS:
        raise ValueError(f"{record} is not a record")


def longer(column: npt.NDArray[Number], at_least: int) -> npt.NDArray[Number]:
    """Returns a longer copy, padded with zeros. It grows by at least a quarter, so that growth is amortized O(1)."""
    grown = np.zeros(max(at_least, len(column) + len(column) // 4, _MIN_ROOM), column.dtype)
    grown[: len(column)] = column
    return grown
