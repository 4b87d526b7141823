"""Segment files: reads and writes of whole pages around the page cache, and counts of the users of each file.

Positions are pages. Does not know what the pages hold.
"""

import asyncio
import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from moonserve.kvstore.disk.base import PAGE
from moonserve.kvstore.disk.health import HangTracker
from moonserve.kvstore.disk.io.buffers import AlignedScratch

_MAX_BUFFERS = 1024  # IOV_MAX of Linux
_AHEAD_PAGES = 4 * 2**20 // PAGE
"""Pages that a `FileWindow` reads at a time."""


def sync_folder(path: Path) -> None:
    """Makes the folder's file names durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_durably(path: Path, text: str) -> None:
    """Replaces the file's content atomically and durably. Raises OSError."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        with fresh.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(path.parent)


class FileCalls:
    """System calls that can fail or hang because of the disk. Tests subclass it to inject faults."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def sync_folder(self, path: Path) -> None:
        sync_folder(path)


class SegmentFile:
    """An open segment file. `write`, `read` and `sync` are for I/O threads; users are counted in the event loop."""

    def __init__(self, fd: int, number: int, calls: FileCalls, waits: HangTracker) -> None:
        self.number = number
        self._waits = waits
        self._fd = fd
        self._calls = calls
        self._users = 0
        self._unused: asyncio.Event | None = None

    @property
    def num_pages(self) -> int:
        """Whole pages in the file now; a torn page does not count."""
        return os.fstat(self._fd).st_size // PAGE

    def fileno(self) -> int:
        """File descriptor, for the ring."""
        return self._fd

    @property
    def inode(self) -> tuple[int, int]:
        stat = os.fstat(self._fd)
        return stat.st_dev, stat.st_ino

    def write(self, page: int, buffers: Sequence[memoryview]) -> None:
        """Writes buffers from a page on. Raises OSError unless everything was written."""
        offset = page * PAGE
        for left in _chunks(buffers):
            while left:
                with self._waits:
                    done = self._calls.pwritev(self._fd, left, offset)
                if not done:
                    raise OSError(errno.EIO, "the disk wrote nothing")
                offset += done
                left = _rest(left, done)

    def read(self, page: int, buffers: Sequence[memoryview]) -> int:
        """Reads into buffers and returns the bytes read: fewer than requested at the end of a truncated file."""
        offset = begin = page * PAGE
        for left in _chunks(buffers):
            while left:
                with self._waits:
                    done = self._calls.preadv(self._fd, left, offset)
                if not done:
                    return offset - begin
                offset += done
                left = _rest(left, done)
        return offset - begin

    def sync(self) -> None:
        with self._waits:
            self._calls.fdatasync(self._fd)

    def __enter__(self) -> "SegmentFile":
        self.hold()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def hold(self) -> None:
        """Marks the file as in use: it is neither closed nor reused for another segment until `release`."""
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if not self._users and self._unused is not None:
            self._unused.set()

    @property
    def in_use(self) -> bool:
        return self._users > 0

    async def wait_until_unused(self) -> None:
        """Waits until the file is not in use. No new user may start meanwhile."""
        if self._users:
            self._unused = asyncio.Event()
            await self._unused.wait()

    def close(self) -> None:
        os.close(self._fd)


class FileWindow:
    """View of a file through a buffer that moves forward as later pages are requested."""

    def __init__(self, file: SegmentFile, scratch: AlignedScratch) -> None:
        self._file = file
        self._scratch = scratch
        self._borrowed = ExitStack()
        self._begin = 0
        self._held = memoryview(b"")

    def view(self, page: int, num_pages: int) -> memoryview:
        """Returns the requested pages, fewer at the end of the file. Valid until the next call."""
        end = (page + num_pages - self._begin) * PAGE
        if page < self._begin or end > len(self._held):
            self._load(page, max(num_pages, _AHEAD_PAGES))
        at = (page - self._begin) * PAGE
        return self._held[at : at + num_pages * PAGE]

    def _load(self, page: int, num_pages: int) -> None:
        self.close()
        scratch = self._borrowed.enter_context(self._scratch.borrow(num_pages * PAGE))
        nbytes = self._file.read(page, [scratch[: num_pages * PAGE]])
        self._begin, self._held = page, scratch[: nbytes // PAGE * PAGE]

    def close(self) -> None:
        self._borrowed.close()


def open_file(path: Path, *, create: bool, direct: bool) -> tuple[int, bool]:
    """Returns a file descriptor and True if it bypasses the page cache, which not every file system supports."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o600), False


def _chunks(buffers: Sequence[memoryview]) -> list[list[memoryview]]:
    filled = [buffer for buffer in buffers if buffer]
    return [filled[begin : begin + _MAX_BUFFERS] for begin in range(0, len(filled), _MAX_BUFFERS)]


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """Returns the rest of `buffers` after the first `done` bytes."""
    index = 0
    while index < len(buffers) and done >= len(buffers[index]):
        done -= len(buffers[index])
        index += 1
    left = buffers[index:]
    if done:
        left[0] = left[0][done:]
    return left
