"""Index and map of `base` over the compiled library: Python owns the memory, C changes it.

Its rule: no address goes to C that Python has not checked the bounds of and keeps alive. Knows nothing of readers.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.native.base import MAX_RECORDS, Entry, Record, RecordArray
from kvstore.native.layout import (
    HEADER,
    MIN_SLOTS,
    SLOT,
    Geometry,
    check_entry,
    check_key,
    check_keys,
    entry_of,
    more_slots,
    place_of,
)
from kvstore.native.memory import Allocate, Retire
from kvstore.native.prototypes import MapState, MetadataLibrary, Table
from protocol.keys import KEY_BYTES, BlockKey, pack_keys
from transfer.native.base import address_of

MAP_SLOT_BYTES = 20


def table_over(memory: memoryview, geometry: Geometry) -> Table:
    """What C knows of an index; `memory` is the caller's to keep."""
    at = address_of(memory)
    return Table(at, at + HEADER.size, geometry.num_slots, geometry.num_all, geometry.seed)


class NativeKeyIndex:
    """`KeyIndex` in memory from `allocate`."""

    def __init__(self, library: MetadataLibrary, allocate: Allocate, retire: Retire) -> None:
        self._library = library
        self._allocate, self._retire = allocate, retire
        self._found = ctypes.create_string_buffer(SLOT.size)
        self._one = (ctypes.c_int64 * 1)()
        self._settle(*self._make(Geometry.starting()))

    @property
    def memory(self) -> memoryview:
        """What peers map or READ; another one after the index has grown."""
        return self._memory

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def nbytes(self) -> int:
        return len(self._memory)

    def __len__(self) -> int:
        return int(HEADER.unpack_from(self._memory)[6])

    def insert(self, key: BlockKey, entry: Entry) -> None:
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
        check_key(key)
        self._library.index_records(self._at, key, 1, self._one)
        return self._one[0]

    def records_of(self, keys: Sequence[BlockKey]) -> list[Record]:
        packed = pack_keys(keys)
        if len(packed) != len(keys) * KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes")
        records = (ctypes.c_int64 * len(keys))()
        self._library.index_records(self._at, packed, len(keys), records)
        return records[:]

    def records_in(self, packed_keys: bytes) -> RecordArray:
        count = check_keys(packed_keys)
        records = np.empty(count, np.int64)
        self._library.index_records_unlocked(self._at, packed_keys, count, address_of(records))
        return records

    def relocate(self, key: BlockKey, offset: int | None) -> None:
        check_key(key)
        found = self._library.index_relocate(self._at, key, place_of(offset))
        assert found, "the key is not there"

    def remove(self, key: BlockKey) -> None:
        check_key(key)
        found = self._library.index_remove(self._at, key)
        assert found, "the key is not there"

    def validate(self) -> None:
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
        """False when entries would run over its end."""
        table = table_over(memory, geometry)
        if not self._library.index_move(ctypes.addressof(table), self._at):
            self._retire(memory)
            return False
        self._settle(memory, geometry)
        return True


class NativeKeyMap:
    """`KeyMap`."""

    def __init__(self, library: MetadataLibrary) -> None:
        self._library = library
        self._settle(*self._make(MIN_SLOTS, secrets.randbits(64)))

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def __len__(self) -> int:
        return int(self._map.count)

    def get(self, key: BlockKey) -> int:
        check_key(key)
        return int(self._library.map_get(self._at, key))

    def put(self, key: BlockKey, value: int) -> None:
        check_key(key)
        if not 0 <= value < MAX_RECORDS:
            raise ValueError(f"{value} is not a number below {MAX_RECORDS}")
        while not self._library.map_put(self._at, key, value):
            self._grow()

    def pop(self, key: BlockKey) -> int:
        check_key(key)
        return int(self._library.map_pop(self._at, key))

    def _make(self, num_slots: int, seed: int) -> tuple[npt.NDArray[np.uint8], MapState]:
        slots = np.zeros(num_slots * MAP_SLOT_BYTES, np.uint8)
        return slots, MapState(address_of(slots), num_slots, seed, 0)

    def _settle(self, slots: npt.NDArray[np.uint8], state: MapState) -> None:
        self._slots, self._map = slots, state
        self._at = ctypes.addressof(state)

    def _grow(self) -> None:
        slots, state = self._make(more_slots(self._map.num_slots), self._map.seed)
        self._library.map_move(ctypes.addressof(state), self._at)
        self._settle(slots, state)
