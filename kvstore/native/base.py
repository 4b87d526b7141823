"""The structures that hold one entry per block: what they promise, whoever implements them.

A node holds millions of blocks, so these live in plain memory instead of Python objects: `metadata.c`, compiled on
first use, or the twin in Python where there is no compiler, which takes more memory and which only its owner reads.
A *record* is the number of a block in its node: dense, below 2**32, given again after the block has gone.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from protocol.keys import BlockKey

Record = int
RecordArray = npt.NDArray[np.int64]

NO_RECORD: Record = -1
MAX_RECORDS = 2**32 - 1
OFFSET_UNIT = 256
"""Bytes; offsets in a segment are multiples of it (`kvstore.allocator.ALIGNMENT`)."""
MAX_OBJECT_BYTES = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Entry:
    """What a reader must know of a visible object."""

    record: Record
    generation: int  # above 0; never given to another object of the node, so equal means unchanged
    checksum: int
    length: int
    offset: int | None  # in the node's segment; None = not in memory, only on disk


class KeyIndex(Protocol):
    """Visible objects by key, in memory that other processes map or READ while its owner changes it.

    The owner is one thread. Readers see each entry as it was before or after a change, never between, and find an entry
    that is there throughout their search (mapped readers; a one-sided READ may miss, and then asks).
    """

    def insert(self, key: BlockKey, entry: Entry) -> None:
        """`key` is not present. May move to larger memory."""

    def find(self, key: BlockKey) -> Entry | None: ...

    def record_of(self, key: BlockKey) -> Record:
        """NO_RECORD when `key` is absent."""

    def records_of(self, keys: Sequence[BlockKey]) -> list[Record]:
        """Of each key, NO_RECORD where it is absent. One pass, for prefixes of many blocks."""

    def records_in(self, packed_keys: bytes) -> RecordArray:
        """As `records_of`, of 16-byte keys back to back, and without the interpreter's lock: others run meanwhile."""

    def relocate(self, key: BlockKey, offset: int | None) -> None:
        """`key`, which is present, lies elsewhere from now on. Readers who copied from the old place before notice."""

    def remove(self, key: BlockKey) -> None:
        """`key` is present. On return no reader that starts finds it, and one that was copying notices."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Memory that it takes now."""

    def validate(self) -> None:
        """Raises AssertionError unless every entry can be found and the count is right."""


class KeyMap(Protocol):
    """Private memory: key → a number below 2**32 - 1."""

    def get(self, key: BlockKey) -> int:
        """NO_RECORD when absent."""

    def put(self, key: BlockKey, value: int) -> None:
        """Adds or replaces."""

    def pop(self, key: BlockKey) -> int:
        """Removes and gives the value; NO_RECORD when absent."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class RankHeap(Protocol):
    """Records by rank. A rank is (primary, secondary); the smallest is first. O(log n) each.

    A record keeps its rank while it is not in the heap. Primaries take no memory while all of them are 0.
    """

    def put(self, record: Record, primary: float, secondary: int) -> None:
        """Adds `record`, or moves it: `rank` and `offer`."""

    def rank(self, record: Record, primary: float, secondary: int) -> None:
        """Its rank from now on, whether it is in the heap or not."""

    def rank_all(self, records: RecordArray, secondary: int) -> None:
        """As `rank` with primary 0 for each in order, with `secondary` and the numbers behind it; a record may come
        twice. Without the interpreter's lock."""

    def rank_of(self, record: Record) -> tuple[float, int]:
        """The last one given; `record` had one."""

    def offer(self, record: Record) -> None:
        """Adds `record` with the rank that it had last; no-op when it is there."""

    def discard(self, record: Record) -> None:
        """No-op when absent."""

    def first(self) -> Record:
        """NO_RECORD when empty."""

    def __contains__(self, record: object) -> bool: ...

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


Allocate = Callable[[int], memoryview]
"""Gives so many bytes, zeroed, which stay where they are."""
Retire = Callable[[memoryview], None]
"""Takes memory back that the index has left. Readers that still map it find it marked, so it may be unmapped here but
not shortened or overwritten while somebody else maps it."""


def anonymous(nbytes: int) -> memoryview:
    """Memory of this process alone."""
    return memoryview(mmap.mmap(-1, nbytes))


def dropped(_memory: memoryview) -> None:
    """Goes with its last reference."""
