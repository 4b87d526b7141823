"""`Lookups` of `reader` in Python, as the compiled ones do it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstore.native.base import OFFSET_UNIT, Entry
from kvstore.native.layout import (
    NOWHERE,
    RETIRED_AT,
    Fields,
    Geometry,
    Retired,
    entry_of,
    is_sealed,
)
from kvstore.native.slots import Slots
from protocol.keys import BlockKey, iter_keys
from transfer.native.base import address_of

if TYPE_CHECKING:
    from kvstore.native.lookups import Addresses, Copied

_ABSENT, _PRESENT, _UNKNOWN = range(3)
_NOT_THERE, _ON_DISK, _TOO_SMALL, _CHANGED, _NOT_KNOWN = range(-1, -6, -1)
_MISSING, _SENT, _IN_MEMORY, _ONLY_ON_DISK, _NOT_TOLD = range(5)
_PATIENCE = 1000
"""Tries again, as in metadata.c."""
Patience = Iterator[int]


def patience(num_keys: int) -> Patience:
    """For all keys of a call, so that it ends soon however many they are."""
    return iter(range(_PATIENCE + num_keys))


class PythonLookups:
    """Over memory that it keeps alive."""

    def __init__(
        self, index_memory: memoryview, geometry: Geometry, data_memory: memoryview
    ) -> None:
        self._slots = Slots(index_memory, geometry)
        self._data = data_memory
        self._place = address_of(data_memory) if len(data_memory) else 0

    def find(self, key: BlockKey) -> tuple[int, Entry | None]:
        status, fields = self._look(key, patience(1))
        return status, None if fields is None else entry_of(fields)

    def exists(self, packed_keys: bytes, count: int) -> bytes:
        tries = patience(count)
        return bytes(self._look(key, tries)[0] for key in iter_keys(packed_keys))

    def copy(
        self, packed_keys: bytes, addresses: Addresses, capacities: Addresses, into: Copied
    ) -> None:
        tries = patience(len(addresses))
        lengths, checksums, generations = into.lengths, into.checksums, into.generations
        places = zip(addresses.tolist(), capacities.tolist(), strict=True)
        for i, (key, (to, capacity)) in enumerate(zip(iter_keys(packed_keys), places, strict=True)):
            length, entry = self._copy_key(key, to, capacity, tries)
            lengths[i] = length
            checksums[i] = entry.checksum if entry is not None else 0
            generations[i] = entry.generation if entry is not None else 0

    def locate(
        self, packed_keys: bytes, rooms: Addresses, budget: int, rows: Addresses, pieces: Addresses
    ) -> int:
        tries, num_pieces = patience(len(rooms)), 0
        for i, (key, room) in enumerate(zip(iter_keys(packed_keys), rooms.tolist(), strict=True)):
            status, fields = self._look(key, tries)
            if fields is None:
                rows[i] = 0, (_MISSING if status == _ABSENT else _NOT_TOLD) << 32, 0, 0
                continue
            entry = entry_of(fields)
            standing = self._standing(entry, min(room, budget))
            where = NOWHERE * OFFSET_UNIT if entry.offset is None else entry.offset
            rows[i] = where, entry.length | standing << 32, entry.checksum, entry.generation
            if standing == _SENT and entry.offset is not None:
                budget -= entry.length
                pieces[num_pieces] = self._place + entry.offset, entry.length
                num_pieces += entry.length > 0
        return num_pieces

    def _standing(self, entry: Entry, room: int) -> int:
        if entry.offset is None:
            return _ONLY_ON_DISK
        if entry.offset + entry.length > len(self._data):
            return _NOT_TOLD
        return _SENT if entry.length <= room else _IN_MEMORY

    def _copy_key(
        self, key: BlockKey, to: int, capacity: int, tries: Patience
    ) -> tuple[int, Entry | None]:
        status, before = self._look(key, tries)
        if before is None:
            return (_NOT_THERE if status == _ABSENT else _NOT_KNOWN), None
        entry = entry_of(before)
        length = self._copy(entry, to, capacity)
        if length >= 0:
            status, after = self._look(key, tries)
            if after != before:
                length = _NOT_KNOWN if status == _UNKNOWN else _CHANGED
        return length, entry

    def _copy(self, entry: Entry, to: int, capacity: int) -> int:
        """The length when it was copied, else why not."""
        if entry.offset is None:
            return _ON_DISK
        if entry.length > capacity:
            return _TOO_SMALL
        if entry.offset + entry.length > len(self._data):
            return _NOT_KNOWN
        ctypes.memmove(to, self._place + entry.offset, entry.length)
        return entry.length

    def _look(self, key: BlockKey, tries: Patience) -> tuple[int, Fields | None]:
        while True:
            status, fields = self._look_once(key)
            if status != _UNKNOWN or next(tries, None) is None:
                return status, fields
            os.sched_yield()

    def _look_once(self, key: BlockKey) -> tuple[int, Fields | None]:
        slots = self._slots
        version = slots.version
        at = slots.search(key)
        fields = slots.fields(at) if at < slots.end else None
        if slots.memory[RETIRED_AT]:
            raise Retired
        if fields is not None and fields[2]:
            return (
                (_PRESENT, fields) if fields[0] == key and is_sealed(fields) else (_UNKNOWN, None)
            )
        still = version % 2 == 0 and version == slots.version
        return (_ABSENT if still else _UNKNOWN), None
