"""Reads another process's key index in mapped memory.

Owns the rules of validity. An entry is valid if its tag fits; its absence, if nothing changed meanwhile; copied bytes,
if their object was there before and after the copy; nothing is valid once the memory is retired. A result that cannot
be determined in bounded time is "unknown", and the caller asks the owner. Bounds are checked here, whatever the memory
says. Knows neither who maps it nor checksums of data.
"""

from __future__ import annotations

import ctypes

import numpy as np

from kvstore.native.base import Entry
from kvstore.native.layout import (
    HEADER,
    SLOT,
    Addresses,
    Copied,
    Geometry,
    Presence,
    Retired,
    check_key,
    check_keys,
    entry_of,
)
from kvstore.native.metadata import table_over
from kvstore.native.prototypes import Mapping, metadata_library
from protocol.keys import BlockKey
from transfer.native import address_of

_ALIGNMENT = 8
_FOUND, _RETIRED = 1, 3
ROW_WORDS = 4
"""Words per row of `MappedReader.locate`."""


class Unknown(Exception):
    """The index kept changing, or its owner stopped in the middle of a change. Ask the owner."""


class MappedReader:
    """Reads an index and its owner's data, both mapped here, read-only or not. One call of C per batch; calls that may
    be long release the GIL. Thread-safe. Keeps the memory alive that it reads.

    Every call raises Retired if the index has moved; then create a reader over its new memory.
    """

    def __init__(self, index_memory: memoryview, data_memory: memoryview) -> None:
        """Raises Retired if the index has moved, Incompatible if the memory is not an index."""
        geometry = Geometry.parse(index_memory[: HEADER.size], len(index_memory))
        if address_of(index_memory) % _ALIGNMENT:
            raise ValueError(f"the index must be mapped at a multiple of {_ALIGNMENT} bytes")
        self._library = metadata_library()
        self._memories = index_memory, data_memory
        data = address_of(data_memory) if len(data_memory) else 0
        self._mapping = Mapping(table_over(index_memory, geometry), data, len(data_memory))
        self.mapping_at = ctypes.addressof(self._mapping)
        """Address of the C structure of both memories, valid while this object lives."""

    @property
    def locate_at(self) -> int:
        """Address of `reader_locate`, for other compiled code."""
        return ctypes.cast(self._library.reader_locate, ctypes.c_void_p).value or 0  # type: ignore[arg-type]

    def find(self, key: BlockKey) -> Entry | None:
        """Returns the entry of `key`; None if it is absent. Raises Unknown."""
        check_key(key)
        found = ctypes.create_string_buffer(SLOT.size)
        status = self._library.reader_find(self.mapping_at, key, found)
        if status == _RETIRED:
            raise Retired
        if status == Presence.UNKNOWN:
            raise Unknown
        return entry_of(SLOT.unpack(found)) if status == _FOUND else None

    def exists(self, packed_keys: bytes) -> bytes:
        """Returns a `Presence` byte per key."""
        count = check_keys(packed_keys)
        statuses = ctypes.create_string_buffer(count)
        if not self._library.reader_exists(self.mapping_at, packed_keys, count, statuses):
            raise Retired
        return statuses.raw

    def copy(self, packed_keys: bytes, addresses: Addresses, capacities: Addresses) -> Copied:
        """Copies each object that is in memory to its address, if its capacity is sufficient.

        Shape of both arrays: (keys,), or (keys, pieces) to fill the pieces of an object one after another. The copied
        bytes are only valid where a length is returned. Addresses are not checked.
        """
        count = check_keys(packed_keys)
        for array in (addresses, capacities):
            if len(array) != count or array.shape != addresses.shape or array.dtype != np.uint64:
                raise ValueError(f"{count} keys need as many uint64 addresses and capacities")
        into = Copied(np.empty((3, count), np.int64))
        if not (addresses.flags.c_contiguous and capacities.flags.c_contiguous):
            addresses, capacities = map(np.ascontiguousarray, (addresses, capacities))
        rows, pieces = address_of(into.rows), addresses.size // count if count else 0
        places = pieces, address_of(addresses), address_of(capacities)
        outcomes = rows, rows + 8 * count, rows + 16 * count
        if not self._library.reader_copy(self.mapping_at, packed_keys, count, *places, *outcomes):
            raise Retired
        return into

    def locate(self, packed_keys: bytes, rooms: Addresses, budget: int, rows: Addresses, pieces: Addresses) -> int:
        """Locates objects, and lists the memory of those that fit. Returns the number of `pieces`.

        `rooms` limits the bytes of each object, `budget` the bytes of all pieces. Fills `rows`, shape (keys, 4):
        offset, length with `Standing`, checksum, generation; and `pieces`, shape (keys, 2): address and length, in
        order, without empty ones. The objects are not held: bytes read from the pieces are only valid if they match
        the checksum.
        """
        count = check_keys(packed_keys)
        if rooms.shape != (count,) or rows.shape != (count, ROW_WORDS) or pieces.shape != (count, 2):
            raise ValueError(f"{count} keys need as many rooms, rows and pieces")
        if any(a.dtype != np.uint64 or not a.flags.c_contiguous for a in (rooms, rows, pieces)):
            raise ValueError("rooms, rows and pieces must be contiguous uint64")
        asked = packed_keys, address_of(rooms), count, budget
        places = address_of(rows), address_of(pieces)
        num_pieces = self._library.reader_locate(self.mapping_at, *asked, *places)
        if num_pieces < 0:
            raise Retired
        return num_pieces
