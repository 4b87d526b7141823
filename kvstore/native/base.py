"""Common types of the structures with one entry per block.

A node holds millions of blocks, so these structures are plain memory instead of Python objects. A *record* is the
number of a block in its node: dense, below 2**32, reused after the block has gone.
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
"""Offsets in a segment are multiples of this many bytes (`kvstore.allocator.ALIGNMENT`)."""
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


def anonymous(nbytes: int) -> memoryview:
    """Returns private memory of this process."""
    return memoryview(mmap.mmap(-1, nbytes))


def dropped(_memory: memoryview) -> None:
    """Does nothing: the memory is freed with its last reference."""
