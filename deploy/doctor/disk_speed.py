"""How fast a folder's disk reads: a file written there, read back around the page cache, and removed.

Owns one figure. Its rule: what is read comes from the disk, so the cache is passed by (O_DIRECT), or told to forget the
file where the file system has no such thing. Knows no store; leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from kvstore.disk.files import open_file
from protocol.errors import ConfigError

FILE_BYTES = 128 << 20
_READ_BYTES = 1 << 20  # as the SSD tier reads runs of blocks
_NUM_THREADS = 4  # a disk is fast only when several reads are under way
_PASSES = 3


def read_bytes_per_s(folder: Path, *, file_bytes: int = FILE_BYTES) -> float:
    """The median of a few passes. Raises ConfigError when the folder cannot be written to."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="moonserve-profile-") as scratch:
            path = Path(scratch) / "file"
            _write(path, file_bytes)
            return file_bytes / median(_read(path, file_bytes) for _ in range(_PASSES))
    except OSError as error:
        raise ConfigError(f"--disk {folder}: {error.strerror}") from error


def _write(path: Path, nbytes: int) -> None:
    """Random bytes, since some disks do not store zeros."""
    fd, _ = open_file(path, create=True, direct=False)
    try:
        for offset in range(0, nbytes, _READ_BYTES):
            os.pwrite(fd, os.urandom(_READ_BYTES), offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path, nbytes: int) -> float:
    """Seconds."""
    fd, direct = open_file(path, create=False, direct=True)
    try:
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        pieces = range(0, nbytes, _READ_BYTES)
        began = time.perf_counter()
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            shares = [pieces[first::_NUM_THREADS] for first in range(_NUM_THREADS)]
            list(threads.map(lambda share: _read_share(fd, share), shares))
        return time.perf_counter() - began
    finally:
        os.close(fd)


def _read_share(fd: int, offsets: Sequence[int]) -> None:
    memory = mmap.mmap(-1, _READ_BYTES)  # begins on a page, as O_DIRECT wants
    with memory:
        for offset in offsets:
            os.preadv(fd, [memory], offset)
