"""What the structures that hold one entry per block have in common.

A node holds millions of blocks, so these live in plain memory instead of Python objects. A *record* is the number of a
block in its node: dense, below 2**32, given again after the block has gone.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
