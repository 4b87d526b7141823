"""Memory for I/O that goes around the page cache: it has to begin on a page. Knows no files."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator

import numpy as np

from kvstore.disk.base import PAGE

_SMALLEST = 64 * 2**10
_KEPT_BYTES = 64 * 2**20
"""Fresh pages cost more than the copy into them (0.9 against 12 GB/s), so some are kept between calls."""


def is_aligned(memory: memoryview) -> bool:
    """Whether it begins on a page, so that a disk can read or write it directly."""
    if not memory.nbytes:
        return True
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address % PAGE == 0


class Scratch:
    """Aligned memory to borrow. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0
        self.num_borrowed = 0

    @contextlib.contextmanager
    def borrow(self, nbytes: int) -> Iterator[memoryview]:
        """At least `nbytes`, with whatever was in them. No view of it may be left at the end."""
        memory = self._take(max(_SMALLEST, 1 << (nbytes - 1).bit_length()))
        try:
            yield memoryview(memory)
        finally:
            self._give_back(memory)

    def _take(self, size: int) -> mmap.mmap:
        with self._lock:
            self.num_borrowed += 1
            if fitting := self._idle.get(size):
                self._idle_bytes -= size
                return fitting.pop()
        return mmap.mmap(-1, size)

    def _give_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            self.num_borrowed -= 1
            if self._idle_bytes + len(memory) <= _KEPT_BYTES:
                self._idle_bytes += len(memory)
                self._idle.setdefault(len(memory), []).append(memory)
