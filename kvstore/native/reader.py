"""Reading another process's key index: in mapped memory, or piecewise by one-sided READs.

Owns what a reader may believe. Its rule: an entry counts when its tag fits, its absence when nothing changed meanwhile,
copied bytes when their object lay there before and after, and nothing once the memory is retired; what cannot be
told in bounded time is "unknown", and the owner is asked. Bounds are checked here, whatever the memory says. Knows
neither who maps it nor checksums of data.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from kvstore.native.base import Entry
from kvstore.native.layout import (
    HEADER,
    SLOT,
    Geometry,
    Retired,
    check_key,
    check_keys,
    entry_of,
    is_sealed,
)
from kvstore.native.library import compiled
from kvstore.native.lookups import Addresses, Copied, Lookups, NotCopied, Presence, Standing
from kvstore.native.native_reader import NativeLookups
from kvstore.native.python_reader import PythonLookups
from protocol.keys import BlockKey

ROW_WORDS = 4
"""Of `MappedReader.locate`."""
HOME_SLOTS = 8
"""One READ of 384 bytes finds nine in ten of the keys that are there, at the highest load."""


class Unknown(Exception):
    """The index kept changing, or its owner stopped in the midst of a change. Ask the owner."""


class MappedReader:
    """An index and its owner's data, both mapped here, read-only or not. May be used by several threads.

    Every call raises Retired when the index has moved; then a reader over its new memory is to be made.
    """

    def __init__(self, index_memory: memoryview, data_memory: memoryview) -> None:
        """Raises Incompatible for memory that is not an index, Retired for one that has moved."""
        geometry = Geometry.parse(index_memory[: HEADER.size], len(index_memory))
        libraries = compiled()
        self._lookups: Lookups = (
            PythonLookups(index_memory, geometry, data_memory)
            if libraries is None
            else NativeLookups(libraries[0], index_memory, geometry, data_memory)
        )

    @property
    def native(self) -> NativeLookups | None:
        """For other compiled code that looks here; None without a compiler."""
        return self._lookups if isinstance(self._lookups, NativeLookups) else None

    def find(self, key: BlockKey) -> Entry | None:
        """Raises Unknown."""
        check_key(key)
        presence, entry = self._lookups.find(key)
        if presence == Presence.UNKNOWN:
            raise Unknown
        return entry

    def exists(self, packed_keys: bytes) -> bytes:
        """A `Presence` per key."""
        return self._lookups.exists(packed_keys, check_keys(packed_keys))

    def copy(self, packed_keys: bytes, addresses: Addresses, capacities: Addresses) -> Copied:
        """Copies each object that is in memory to its address, if there is room for it.

        What lies there afterwards counts only where a length is given. Addresses are taken as they are.
        """
        count = check_keys(packed_keys)
        for array in (addresses, capacities):
            if array.shape != (count,) or array.dtype != np.uint64:
                raise ValueError(f"{count} keys need as many uint64 addresses and capacities")
        into = Copied(np.empty((3, count), np.int64))
        if not (addresses.flags.c_contiguous and capacities.flags.c_contiguous):
            addresses, capacities = map(np.ascontiguousarray, (addresses, capacities))
        self._lookups.copy(packed_keys, addresses, capacities, into)
        return into

    def locate(
        self, packed_keys: bytes, rooms: Addresses, budget: int, rows: Addresses, pieces: Addresses
    ) -> int:
        """Where objects lie, and the memory of those that fit: how many `pieces` that are.

        `rooms`: how many bytes of each are wanted at most; all that are given have at most `budget`. Fills `rows`,
        shape (keys, 4): offset, length with `Standing`, checksum, generation; and `pieces`, shape (keys, 2): address
        and length, in order, without the empty ones. Nothing keeps the objects there: what is read of the pieces
        counts when it matches the checksum.
        """
        count = check_keys(packed_keys)
        if (
            rooms.shape != (count,)
            or rows.shape != (count, ROW_WORDS)
            or pieces.shape != (count, 2)
        ):
            raise ValueError(f"{count} keys need as many rooms, rows and pieces")
        if any(a.dtype != np.uint64 or not a.flags.c_contiguous for a in (rooms, rows, pieces)):
            raise ValueError("rooms, rows and pieces must be contiguous uint64")
        return self._lookups.locate(packed_keys, rooms, budget, rows, pieces)


class Miss(Enum):
    """What `scan` says without an entry."""

    ABSENT = "absent"
    """From a READ this is a hint: entries move, and the slots may have been read in the midst of that."""
    NEED_MORE = "need more"
    """The run goes on behind what was read, or was being changed."""


def slots_of(geometry: Geometry, key: BlockKey, num_slots: int = HOME_SLOTS) -> tuple[int, int]:
    """Offset and length of what to READ of an index to find `key`; never beyond its end."""
    check_key(key)
    offset = geometry.home_of(key)
    return offset, min(num_slots * SLOT.size, geometry.nbytes - offset)


def scan(slots: bytes | memoryview, key: BlockKey) -> Entry | Miss:
    """What slots that were READ from `slots_of` on say about `key`.

    The header's `retired` must be READ after the slots, and the slots again after the data.
    """
    for fields in SLOT.iter_unpack(slots):
        if not fields[2]:
            return Miss.ABSENT
        if not is_sealed(fields):
            return Miss.NEED_MORE
        if fields[0] == key:
            return entry_of(fields)
    return Miss.NEED_MORE


__all__ = [
    "Copied",
    "Geometry",
    "MappedReader",
    "Miss",
    "NotCopied",
    "Presence",
    "Retired",
    "Standing",
    "Unknown",
    "scan",
    "slots_of",
]
