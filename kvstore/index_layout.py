"""Memory layout of a node's key index, and the types of its entries and of its readers' results. Pure.

A node holds millions of blocks, so its index is plain memory instead of Python objects. A *record* is the number of a
block in its node: dense, below 2**32, reused after the block has gone.

The index has a header of 64 bytes, then `num_slots` home slots, then a tail of more slots, so that a run of occupied
slots never wraps around. An entry is in the first free slot from its key's home slot on; a search ends at an empty
slot. Must match `native/published_index.c`.
"""

import mmap
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from moonserve.protocol.errors import Incompatible
from moonserve.protocol.kv_blocks import KEY_BYTES

Record = int
RecordArray = npt.NDArray[np.int64]

NO_RECORD: Record = -1
MAX_RECORDS = 2**32 - 1
OFFSET_UNIT = 256
"""Offsets in a segment are multiples of this many bytes (`kvstore.state.allocator.ALIGNMENT`)."""
MAX_OBJECT_BYTES = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Entry:
    """The part of a visible object's metadata that readers need."""

    record: Record
    generation: int  # above 0; never reused by the node, so an equal generation means an unchanged object
    checksum: int
    length: int
    offset: int | None  # in the node's segment; None = only on disk


Allocate = Callable[[int], memoryview]
"""Returns zeroed memory of this many bytes, which never moves."""
Retire = Callable[[memoryview], None]
"""Takes back memory that the index has left. Readers that still map it find it marked as retired, so it may be unmapped
here, but not truncated or overwritten while another process maps it."""


def anonymous_memory(nbytes: int) -> memoryview:
    """Returns private memory of this process."""
    return memoryview(mmap.mmap(-1, nbytes))


# Native alignment and byte order, so that each field is read and written as a whole, also from Python.
HEADER = struct.Struct("@8sIIQQQQQQ")
"""Fields: magic, format, retired, version, num_slots, seed, count, num_tail, 0."""
RETIRED_AT, VERSION_AT = 12, 16
SLOT = struct.Struct("@16sQQIIII")
"""Fields: key, checksum, generation, record, offset in units, length, tag. An empty slot has generation 0."""

MAGIC = b"MoonKIdx"
INDEX_FORMAT = 1
MIN_SLOTS = 64
NUM_TAIL = 64
"""Slots of the tail. A larger displacement has odds of about 1e-19 at the highest load; then the index grows early."""
NO_OFFSET = 2**32 - 1
"""Offset of an object that is not in memory."""

_WORD = 2**64 - 1

SlotFields = tuple[bytes, int, int, int, int, int, int]
"""The fields of `SLOT`."""


class IndexMoved(Exception):
    """The index has moved to other memory. Ask its owner where it is."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Size and seed of an index. A reader needs them to find a key."""

    num_slots: int
    num_tail: int
    seed: int

    @classmethod
    def parse(cls, header: bytes | memoryview, nbytes: int) -> "Geometry":
        """Parses the header, the first 64 bytes of memory of `nbytes`.

        Raises Incompatible unless this is an index that fits into the memory, IndexMoved if the index has left it.
        """
        if len(header) < HEADER.size:
            raise Incompatible(f"{len(header)} bytes are too few for the header of a key index")
        magic, layout, retired, _, num_slots, seed, _, num_tail, _ = HEADER.unpack_from(header)
        if magic != MAGIC or layout != INDEX_FORMAT:
            raise Incompatible(f"not a key index of format {INDEX_FORMAT}: {bytes(header[:12]).hex()}")
        geometry = cls(num_slots, num_tail, seed)
        if not num_slots or geometry.nbytes > nbytes:
            raise Incompatible(f"a key index of {num_slots} slots does not fit into {nbytes} bytes")
        if retired:
            raise IndexMoved
        return geometry

    @classmethod
    def starting(cls) -> "Geometry":
        """Returns the smallest geometry, with a secret seed, since clients choose the keys."""
        return cls(MIN_SLOTS, NUM_TAIL, secrets.randbits(64))

    def grown(self) -> "Geometry":
        return Geometry(next_num_slots(self.num_slots), self.num_tail, self.seed)

    @property
    def num_all(self) -> int:
        return self.num_slots + self.num_tail

    @property
    def nbytes(self) -> int:
        return HEADER.size + self.num_all * SLOT.size

    def header(self) -> bytes:
        return HEADER.pack(MAGIC, INDEX_FORMAT, 0, 0, self.num_slots, self.seed, 0, self.num_tail, 0)


def next_num_slots(num_slots: int) -> int:
    """Returns the next size. Small tables double; large ones grow by a quarter, since unused slots would cost more
    than frequent growth."""
    return num_slots * 2 if num_slots < 4096 else num_slots + num_slots // 4


def entry_of(fields: SlotFields) -> Entry:
    _, checksum, generation, record, place, length, _ = fields
    offset = None if place == NO_OFFSET else place * OFFSET_UNIT
    return Entry(record, generation, checksum, length, offset)


def to_offset_units(offset: int | None) -> int:
    """Returns an offset in units. Raises ValueError for an offset that no slot can hold."""
    if offset is None:
        return NO_OFFSET
    place, rest = divmod(offset, OFFSET_UNIT)
    if rest or not 0 <= place < NO_OFFSET:
        raise ValueError(f"{offset} is not a multiple of {OFFSET_UNIT} below {NO_OFFSET} times it")
    return place


def check_key(key: bytes) -> None:
    """Raises ValueError unless `key` has KEY_BYTES, which compiled code reads."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")


def check_keys(packed_keys: bytes) -> int:
    """Returns the number of packed keys. Raises ValueError if the last one is cut off."""
    count, rest = divmod(len(packed_keys), KEY_BYTES)
    if rest:
        raise ValueError(f"{len(packed_keys)} bytes are not a whole number of keys")
    return count


def check_entry(entry: Entry) -> None:
    """Raises ValueError if a number does not fit into its field."""
    if not (
        0 < entry.generation <= _WORD
        and 0 <= entry.checksum <= _WORD
        and 0 <= entry.record < MAX_RECORDS
        and 0 <= entry.length <= MAX_OBJECT_BYTES
    ):
        raise ValueError(f"no slot can hold {entry}")


Addresses = npt.NDArray[np.uint64]


class Presence(IntEnum):
    """Results of `MappedReader.exists`, one byte each."""

    ABSENT = 0
    PRESENT = 1
    UNKNOWN = 2


class NotCopied(IntEnum):
    """Negative lengths in the result of `MappedReader.copy`."""

    ABSENT = -1
    ON_DISK = -2
    TOO_SMALL = -3
    """The object does not fit. Checksum and generation are given."""
    CHANGED = -4
    """The object was moved or removed meanwhile. Try again."""
    UNKNOWN = -5
    """Ask the owner."""


class LocateStatus(IntEnum):
    """Result of `MappedReader.locate` for an object, in the bits above the 32 bits of its length."""

    MISSING = 0
    SENT = 1
    """The object's bytes are among the pieces."""
    IN_MEMORY = 2
    """The object is in memory but exceeds its room or the budget."""
    ON_DISK = 3
    UNKNOWN = 4
    """Ask the owner."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Result of `MappedReader.copy`, one element per key. Checksum and generation are 0 for absent keys."""

    rows: npt.NDArray[np.int64]
    """Shape (3, keys): lengths, checksums, generations. One array costs a third of three."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Lengths of the copied objects; negative ones are `NotCopied`."""
        lengths: npt.NDArray[np.int64] = self.rows[0]
        return lengths

    @property
    def checksums(self) -> npt.NDArray[np.uint64]:
        checksums: npt.NDArray[np.uint64] = self.rows[1].view(np.uint64)
        return checksums
