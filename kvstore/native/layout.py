"""The memory of a key index: what stands where, and what a reader is told of a key.

A header of 64 bytes, `num_slots` home slots and a tail of more slots, so that a run of occupied ones never wraps
around. An entry lies in the first free slot from its key's home on; a search ends at an empty slot. Pure: knows neither
who changes the memory nor how it is shared. `metadata.c` repeats it.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvstore.native.base import MAX_OBJECT_BYTES, MAX_RECORDS, OFFSET_UNIT, Entry
from protocol.errors import Incompatible
from protocol.keys import KEY_BYTES

# Native alignment and byte order: each field is then read and written as a whole, also from Python.
HEADER = struct.Struct("@8sIIQQQQQQ")
"""Magic, format, retired, version, num_slots, seed, count, num_tail, 0."""
RETIRED_AT, VERSION_AT = 12, 16
SLOT = struct.Struct("@16sQQIIII")
"""Key, checksum, generation, record, offset in units, length, tag. An empty slot's generation is 0."""

MAGIC = b"MoonKIdx"
FORMAT = 1
MIN_SLOTS = 64
NUM_TAIL = 64
"""Displacements beyond it have odds of about 1e-19 at the highest load; then the index grows early."""
MAX_LOAD = 0.70
"""On average 2 slots are looked at for a key that is there and 6 for one that is not (Knuth, vol. 3, 6.4)."""
NOWHERE = 2**32 - 1
"""An offset: not in memory."""

_WORD = 2**64 - 1

Fields = tuple[bytes, int, int, int, int, int, int]
"""What `SLOT` holds."""


class Retired(Exception):
    """The index has moved to other memory; its owner tells where."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How an index is laid out; what a reader must know before it looks for a key."""

    num_slots: int
    num_tail: int
    seed: int

    @classmethod
    def parse(cls, header: bytes | memoryview, nbytes: int) -> Geometry:
        """From the first 64 bytes of memory of `nbytes`.

        Raises Incompatible unless this is an index that fits into it, Retired when it is one no more.
        """
        if len(header) < HEADER.size:
            raise Incompatible(f"{len(header)} bytes are too few for the header of a key index")
        magic, layout, retired, _, num_slots, seed, _, num_tail, _ = HEADER.unpack_from(header)
        if magic != MAGIC or layout != FORMAT:
            raise Incompatible(f"not a key index of format {FORMAT}: {bytes(header[:12]).hex()}")
        geometry = cls(num_slots, num_tail, seed)
        if not num_slots or geometry.nbytes > nbytes:
            raise Incompatible(f"a key index of {num_slots} slots does not fit into {nbytes} bytes")
        if retired:
            raise Retired
        return geometry

    @classmethod
    def starting(cls) -> Geometry:
        """The smallest, with a seed that clients, who choose keys, do not know."""
        return cls(MIN_SLOTS, NUM_TAIL, secrets.randbits(64))

    def grown(self) -> Geometry:
        return Geometry(more_slots(self.num_slots), self.num_tail, self.seed)

    @property
    def num_all(self) -> int:
        return self.num_slots + self.num_tail

    @property
    def nbytes(self) -> int:
        return HEADER.size + self.num_all * SLOT.size

    def header(self) -> bytes:
        return HEADER.pack(MAGIC, FORMAT, 0, 0, self.num_slots, self.seed, 0, self.num_tail, 0)


def more_slots(num_slots: int) -> int:
    """Small tables double; for large ones what is not used would cost more than growing more often."""
    return num_slots * 2 if num_slots < 4096 else num_slots + num_slots // 4


def entry_of(fields: Fields) -> Entry:
    _, checksum, generation, record, place, length, _ = fields
    offset = None if place == NOWHERE else place * OFFSET_UNIT
    return Entry(record, generation, checksum, length, offset)


def place_of(offset: int | None) -> int:
    """Raises ValueError for an offset that no slot can hold."""
    if offset is None:
        return NOWHERE
    place, rest = divmod(offset, OFFSET_UNIT)
    if rest or not 0 <= place < NOWHERE:
        raise ValueError(f"{offset} is not a multiple of {OFFSET_UNIT} below {NOWHERE} times it")
    return place


def check_key(key: bytes) -> None:
    """Raises ValueError unless `key` has a key's length: compiled code reads that much."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")


def check_keys(packed_keys: bytes) -> int:
    """How many there are. Raises ValueError when the last one is cut off."""
    count, rest = divmod(len(packed_keys), KEY_BYTES)
    if rest:
        raise ValueError(f"{len(packed_keys)} bytes are not a whole number of keys")
    return count


def check_entry(entry: Entry) -> None:
    """Raises ValueError when a number does not fit into its field."""
    if not (
        0 < entry.generation <= _WORD
        and 0 <= entry.checksum <= _WORD
        and 0 <= entry.record < MAX_RECORDS
        and 0 <= entry.length <= MAX_OBJECT_BYTES
    ):
        raise ValueError(f"no slot can hold {entry}")


Addresses = npt.NDArray[np.uint64]


class Presence(IntEnum):
    """Bytes that `MappedReader.exists` gives."""

    ABSENT = 0
    PRESENT = 1
    UNKNOWN = 2


class NotCopied(IntEnum):
    """Lengths below zero that `MappedReader.copy` gives."""

    ABSENT = -1
    ON_DISK = -2
    TOO_SMALL = -3
    """Checksum and generation are given."""
    CHANGED = -4
    """It was moved or removed meanwhile; worth another try."""
    UNKNOWN = -5
    """Ask the owner."""


class Standing(IntEnum):
    """What `MappedReader.locate` says of an object, above the 32 bits of its length."""

    MISSING = 0
    SENT = 1
    """Its bytes are among the pieces."""
    IN_MEMORY = 2
    """They are not: no room."""
    ON_DISK = 3
    UNKNOWN = 4
    """Ask the owner."""


@dataclass(frozen=True, slots=True)
class Copied:
    """One element per key; checksum and generation are 0 where nothing was found."""

    rows: npt.NDArray[np.int64]
    """Shape (3, keys): one piece of memory costs a third of three."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Or `NotCopied`."""
        lengths: npt.NDArray[np.int64] = self.rows[0]
        return lengths

    @property
    def checksums(self) -> npt.NDArray[np.uint64]:
        return _unsigned(self.rows[1])

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        return _unsigned(self.rows[2])


def _unsigned(row: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    words: npt.NDArray[np.uint64] = row.view(np.uint64)
    return words
