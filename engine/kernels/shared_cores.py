"""The cores of a host that its workers lend each other while they do not compute.

Each worker has a row in a table in shared memory: until when it computes, and in how many threads. Native kernels read
the table (`engine/kernels/native/thread_pool.h`): a worker that computes borrows its share of the cores that no worker
computes on, and gives them back within a part of an operation. Results do not depend on the number of threads.
"""

import ctypes
import mmap
import os
import time
from types import TracebackType

_MOST_WORKERS = 64  # MOST_WORKERS of thread_pool.h
_ROW_BYTES = 16
_LONGEST_STEP_NS = 60_000_000_000  # after that, a worker that has not ended its step is taken for dead
_PAUSE_NS = 3_000_000  # between two steps of a worker that has more to do


class SharedCores:
    """One worker's view of the table; a context manager around each step."""

    def __init__(self, place: str, num_threads: int) -> None:
        """`place`: path of the table and this worker's row in it, as PATH:ROW. Raises OSError if the table cannot be
        opened, ValueError if there is no such row."""
        path, _, row = place.rpartition(":")
        if not 0 <= int(row) < _MOST_WORKERS:
            raise ValueError(f"{place}: rows are from 0 to {_MOST_WORKERS - 1}")
        table = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(table, _MOST_WORKERS * _ROW_BYTES)
            self._memory = mmap.mmap(table, _MOST_WORKERS * _ROW_BYTES)
        finally:
            os.close(table)
        self._row = (ctypes.c_int64 * 2).from_buffer(self._memory, int(row) * _ROW_BYTES)
        self._row[:] = [0, num_threads]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def __enter__(self) -> None:
        self._row[0] = time.monotonic_ns() + _LONGEST_STEP_NS

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._row[0] = time.monotonic_ns() + _PAUSE_NS
