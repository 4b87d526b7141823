"""Page-aligned memory for I/O around the page cache, and single pages for the ring. Knows no files."""

import mmap
import threading
from collections.abc import Sequence

from moonserve.kvstore.disk.base import PAGE
from moonserve.transfer.memory.data_plane import address_of

_SMALLEST = 64 * 2**10
_KEPT_BYTES = 64 * 2**20
"""Bytes kept between calls, since fresh pages cost more than the copy into them (0.9 against 12 GB/s)."""


def in_place(memory: memoryview, nbytes: int) -> memoryview | None:
    """Returns the first bytes of the memory, which is not empty, if it begins on a page, so that a disk can transfer
    them directly; else None."""
    return memory[:nbytes] if address_of(memory) % PAGE == 0 else None


class AlignedScratch:
    """Thread-safe pool of aligned memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0
        self.num_borrowed = 0

    def borrow(self, nbytes: int) -> "BorrowedMemory":
        """Lends at least `nbytes`, not cleared. No view of it may be left at the end."""
        return BorrowedMemory(self, nbytes)

    def take(self, nbytes: int) -> mmap.mmap:
        """Takes memory as `borrow`; the caller must give it back."""
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


class BorrowedMemory:
    """Lends memory for the duration of a context. A class, since a generator costs as much as a read's bookkeeping."""

    __slots__ = ("_memory", "_scratch", "_size")

    def __init__(self, scratch: AlignedScratch, size: int) -> None:
        self._scratch = scratch
        self._size = size

    def __enter__(self) -> memoryview:
        self._memory = self._scratch.take(self._size)
        return memoryview(self._memory)

    def __exit__(self, *exc_info: object) -> None:
        self._scratch.give_back(self._memory)


MAX_PAGES = 8 * 2**10
"""The ring's own pages, 32 MiB: 64 operations of 128 pages."""
MAX_COPIED_PAGES = 64
"""Pages copied per object: 256 KiB take 15 µs, more would block the event loop too long."""


class OutOfPages(Exception):
    """Raised if the ring has too few free pages. I/O threads have other memory."""


class PagePool:
    """Single pages of memory that is not touched before it is used."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, MAX_PAGES * PAGE))
        self.begin = address_of(self.memory)
        self._idle = list(range(self.begin, self.begin + MAX_PAGES * PAGE, PAGE))

    @property
    def num_in_use(self) -> int:
        return MAX_PAGES - len(self._idle)

    def take(self, num_pages: int) -> list[int]:
        """Returns the addresses of free pages. Raises OutOfPages."""
        left = len(self._idle) - num_pages
        if left < 0:
            raise OutOfPages
        taken = self._idle[left:]
        del self._idle[left:]
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        self._idle += pages


class RingPages:
    """Pages of operations in the ring; give them back once the kernel is done with them."""

    __slots__ = ("_pool", "_taken")

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._taken: list[int] = []

    def take_addresses(self, num_pages: int) -> list[int]:
        """Takes pages from the pool. Raises OutOfPages."""
        pages = self._pool.take(num_pages)
        self._taken += pages
        return pages

    def take(self, num_pages: int) -> list[memoryview]:
        """Takes pages for one object from the pool. Raises OutOfPages."""
        if num_pages > MAX_COPIED_PAGES:
            raise OutOfPages
        memory, begin = self._pool.memory, self._pool.begin
        return [memory[page - begin : page - begin + PAGE] for page in self.take_addresses(num_pages)]

    def give_back(self) -> None:
        self._pool.give_back(self._taken)
        self._taken = []
