"""A disk whose calls do not return for a while, and a clock that stands still."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence

from kvstore.disk.files import FileCalls


class Clock:
    """Stands still until it is told the time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class HangingCalls(FileCalls):
    """Calls of one kind do not return while `answers` is clear."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.answers = threading.Event()
        self.answers.set()
        self.hangs = threading.Semaphore(0)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._wait("write")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._wait("read")
        return super().preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._wait("sync")
        super().fdatasync(fd)

    def _wait(self, kind: str) -> None:
        if kind == self._kind and not self.answers.is_set():
            self.hangs.release()
            self.answers.wait()


@contextlib.contextmanager
def stuck(calls: HangingCalls) -> Iterator[None]:
    calls.answers.clear()
    try:
        yield
    finally:
        calls.answers.set()


async def until_it_hangs(calls: HangingCalls) -> None:
    await asyncio.to_thread(calls.hangs.acquire)
