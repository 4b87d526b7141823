"""A disk whose power can be cut: what may lie on it at any moment, from what was written, flushed and renamed before.

A write is durable when a flush of its file that began after it has ended. Until then any of its sectors may be there,
in any combination; a write that was begun counts, too. Names become durable in their order, at the latest with a flush
of the folder. A file that was never flushed may have no length. `folder.json` is written with flushes of its own and
is taken as it is.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvstore.disk.files import FileCalls

SECTOR = 512


@dataclass(eq=False)
class Write:
    offset: int
    data: bytes
    landed: bool = False


@dataclass
class File:
    """What is durable of it, and the writes that were begun and are not."""

    content: bytearray
    pending: list[Write] = field(default_factory=list)
    was_flushed: bool = False

    def landed(self) -> list[Write]:
        """What a flush that begins now makes durable."""
        return [write for write in self.pending if write.landed]

    def flushed(self, covered: Sequence[Write]) -> None:
        self.was_flushed = True
        for write in covered:
            if write in self.pending:
                self.pending.remove(write)
                self.content[write.offset : write.offset + len(write.data)] = write.data

    def after(self, rng: random.Random, share: float) -> bytes:
        """What may be there if the power is cut now."""
        if not self.was_flushed and rng.random() < 0.2:
            return b""
        content = bytearray(self.content)
        for write in self.pending:
            for begin in range(0, len(write.data), SECTOR):
                if rng.random() < share:
                    at = write.offset + begin
                    content[at : at + SECTOR] = write.data[begin : begin + SECTOR]
        return bytes(content)


class Disk(FileCalls):
    """Does what it is asked and remembers it: `events` are played later, and say what is durable after a part of them.
    Its history begins with an empty folder."""

    def __init__(self) -> None:
        self.events: list[Callable[[], object]] = []
        self._files: dict[int, File] = {}  # by inode
        self._names: dict[int, str] = {}
        self._renames: list[tuple[int, str]] = []
        self._num_durable = 0
        """Renames that the folder's flushes have made durable."""
        self._lock = threading.Lock()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        file, write = self._file(fd), Write(offset, b"".join(buffers))
        self.events.append(lambda: file.pending.append(write))
        done = super().pwritev(fd, buffers, offset)
        self.events.append(partial(setattr, write, "landed", True))
        return done

    def fdatasync(self, fd: int) -> None:
        file, covered = self._file(fd), list[Write]()
        self.events.append(lambda: covered.extend(file.landed()))
        super().fdatasync(fd)
        self.events.append(lambda: file.flushed(covered))

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:  # renames are remembered in the order in which they took place
            inode = source.stat().st_ino
            super().rename(source, target)
            self.events.append(lambda: self._renamed(inode, source.name, target.name))

    def sync_folder(self, path: Path) -> None:
        num_changed: list[int] = []
        self.events.append(lambda: num_changed.append(len(self._renames)))
        super().sync_folder(path)
        self.events.append(lambda: self._synced(*num_changed))

    def cut(self, source: Path, target: Path, rng: random.Random) -> None:
        """A folder as it may be found, made from that in which the events took place."""
        target.mkdir()
        shutil.copy(source / "folder.json", target)
        share = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        num_renamed = rng.randint(self._num_durable, len(self._renames))
        for inode, name in (self._names | dict(self._renames[:num_renamed])).items():
            (target / name).write_bytes(self._files[inode].after(rng, share))

    def _file(self, fd: int) -> File:
        stat = os.fstat(fd)
        return self._files.setdefault(stat.st_ino, File(bytearray(stat.st_size)))

    def _renamed(self, inode: int, before: str, after: str) -> None:
        self._names.setdefault(inode, before)
        self._renames.append((inode, after))

    def _synced(self, num_changed: int) -> None:
        self._num_durable = max(self._num_durable, num_changed)
