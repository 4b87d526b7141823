"""`Lookups` of `reader` in C: one call per batch, long ones without the GIL."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from kvstore.native.base import Entry
from kvstore.native.compiled import table_over
from kvstore.native.layout import SLOT, Geometry, Retired, entry_of
from kvstore.native.prototypes import Mapping, MetadataLibrary
from protocol.keys import BlockKey
from transfer.native.base import address_of

if TYPE_CHECKING:
    from kvstore.native.lookups import Addresses, Copied

_ALIGNMENT = 8
_FOUND, _RETIRED = 1, 3


class NativeLookups:
    """Over memory that it keeps alive."""

    def __init__(
        self,
        library: MetadataLibrary,
        index_memory: memoryview,
        geometry: Geometry,
        data_memory: memoryview,
    ) -> None:
        if address_of(index_memory) % _ALIGNMENT:
            raise ValueError(f"the index must be mapped at a multiple of {_ALIGNMENT} bytes")
        self._library = library
        self._memories = index_memory, data_memory
        data = address_of(data_memory) if len(data_memory) else 0
        self._mapping = Mapping(table_over(index_memory, geometry), data, len(data_memory))
        self._at = ctypes.addressof(self._mapping)

    @property
    def mapping_at(self) -> int:
        """The address of what C knows of this memory; good for as long as this lives."""
        return self._at

    @property
    def locate_at(self) -> int:
        """The address of `reader_locate`."""
        return ctypes.cast(self._library.reader_locate, ctypes.c_void_p).value or 0  # type: ignore[arg-type]

    def find(self, key: BlockKey) -> tuple[int, Entry | None]:
        found = ctypes.create_string_buffer(SLOT.size)
        status = self._library.reader_find(self._at, key, found)
        if status == _RETIRED:
            raise Retired
        return status, entry_of(SLOT.unpack(found)) if status == _FOUND else None

    def exists(self, packed_keys: bytes, count: int) -> bytes:
        statuses = ctypes.create_string_buffer(count)
        if not self._library.reader_exists(self._at, packed_keys, count, statuses):
            raise Retired
        return statuses.raw

    def copy(
        self, packed_keys: bytes, addresses: Addresses, capacities: Addresses, into: Copied
    ) -> None:
        count, rows = len(addresses), address_of(into.rows)
        places = address_of(addresses), address_of(capacities)
        outcomes = rows, rows + 8 * count, rows + 16 * count
        if not self._library.reader_copy(self._at, packed_keys, count, *places, *outcomes):
            raise Retired

    def locate(
        self, packed_keys: bytes, rooms: Addresses, budget: int, rows: Addresses, pieces: Addresses
    ) -> int:
        places = address_of(rows), address_of(pieces)
        num_pieces = self._library.reader_locate(
            self._at, packed_keys, address_of(rooms), len(rooms), budget, *places
        )
        if num_pieces < 0:
            raise Retired
        return num_pieces
