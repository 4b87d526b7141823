"""Memory for I/O that goes around the page cache: it has to begin on a page. Knows no files."""

from __future__ import annotations

import mmap
import threading

from kvstore.disk.base import PAGE
from transfer.native.base import address_of

_SMALLEST = 64 * 2**10
_KEPT_BYTES = 64 * 2**20
"""Fresh pages cost more than the copy into them (0.9 against 12 GB/s), so some are kept between calls."""


def is_aligned(memory: memoryview) -> bool:
    """Whether it begins on a page, so that a disk can read or write it directly."""
    if not memory.nbytes:
        return True
    return address_of(memory) % PAGE == 0


class Scratch:
    """Aligned memory to borrow. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0
        self.num_borrowed = 0

    def borrow(self, nbytes: int) -> Borrowed:
        """At least `nbytes`, with whatever was in them. No view of it may be left at the end."""
        return Borrowed(self, nbytes)

    def take(self, nbytes: int) -> mmap.mmap:
        """As `borrow`, to be given back."""
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            self.num_borrowed += 1
            if fitting := self._idle.get(size):
                self._idle_bytes -= size
                return fitting.pop()
        return mmap.mmap(-1, size)

    def give_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            self.num_borrowed -= 1
            if self._idle_bytes + len(memory) <= _KEPT_BYTES:
                self._idle_bytes += len(memory)
                self._idle.setdefault(len(memory), []).append(memory)


class Borrowed:
    """Memory while its context lasts. A class, since a generator would cost as much as a read's bookkeeping."""

    __slots__ = ("_memory", "_scratch", "_size")

    def __init__(self, scratch: Scratch, size: int) -> None:
        self._scratch = scratch
        self._size = size

    def __enter__(self) -> memoryview:
        self._memory = self._scratch.take(self._size)
        return memoryview(self._memory)

    def __exit__(self, *exc_info: object) -> None:
        self._scratch.give_back(self._memory)
