"""A disk whose calls do not return for a while, or fail, and a clock that stands still."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import threading
from collections.abc import Iterator, Sequence

from kvstore.disk.files import FileCalls
from kvstore.disk.tier import DiskOptions
from tests.kvstore.disk.tiers import SMALL


class Clock:
    """Stands still until it is told the time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FaultyCalls(FileCalls):
    """Calls of one `kind` do not return while `answers` is clear. Kinds are "read", "write" and "sync"."""

    def __init__(self, kind: str = "") -> None:
        self._kind = kind
        self.answers = threading.Event()
        self.answers.set()
        self.hangs = threading.Semaphore(0)
        self.errors: dict[str, int] = {}
        """By kind, what all its calls fail with."""
        self.num_to_fail = 0
        """So many calls that have to wait fail in the end, though they did what they should."""
        self.bad_offset: int | None = None  # what reads it fails
        self.num_flushes = 0
        self._lock = threading.Lock()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._call("write"):
            return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        end = offset + sum(len(buffer) for buffer in buffers)
        if self.bad_offset is not None and offset <= self.bad_offset < end:
            raise OSError(errno.EIO, "made to fail")
        with self._call("read"):
            return super().preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        with self._call("sync"):
            super().fdatasync(fd)
            self.num_flushes += 1

    @contextlib.contextmanager
    def _call(self, kind: str) -> Iterator[None]:
        fails = False
        if kind == self._kind and not self.answers.is_set():
            with self._lock:
                fails = self.num_to_fail > 0
                self.num_to_fail -= fails
            self.hangs.release()
            self.answers.wait()
        if kind in self.errors:
            raise OSError(self.errors[kind], "made to fail")
        yield
        if fails:
            raise OSError(errno.EIO, "made to fail")


def faulty(kind: str = "") -> tuple[FaultyCalls, DiskOptions]:
    calls = FaultyCalls(kind)
    return calls, dataclasses.replace(SMALL, calls=calls, ring=False)


@contextlib.contextmanager
def stuck(calls: FaultyCalls) -> Iterator[None]:
    calls.answers.clear()
    try:
        yield
    finally:
        calls.answers.set()


async def until_it_hangs(calls: FaultyCalls) -> None:
    await asyncio.to_thread(calls.hangs.acquire)
