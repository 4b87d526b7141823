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
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from kvstore.disk.files import FileCalls

SECTOR = 512


class Kind(Enum):
    BEGUN = auto()  # a write
    LANDED = auto()
    FLUSHING = auto()  # a file
    FLUSHED = auto()
    RENAMED = auto()
    SYNCING = auto()  # names
    SYNCED = auto()
    NOTED = auto()  # what the owner knows


@dataclass(frozen=True, slots=True)
class Event:
    kind: Kind
    file: int = 0  # inode
    number: int = 0  # of the write, or of the flush
    offset: int = 0
    data: bytes = b""
    names: tuple[str, str] = ("", "")
    note: object = None


class RecordingCalls(FileCalls):
    """Does what it is asked and remembers it. Its history begins with an empty folder."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.sizes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._number = 0

    def note(self, note: object) -> None:
        self._remember(Event(Kind.NOTED, note=note))

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        file, number = self._file(fd), self._next()
        self._remember(Event(Kind.BEGUN, file, number, offset, b"".join(buffers)))
        done = super().pwritev(fd, buffers, offset)
        self._remember(Event(Kind.LANDED, file, number))
        return done

    def fdatasync(self, fd: int) -> None:
        file, number = self._file(fd), self._next()
        self._remember(Event(Kind.FLUSHING, file, number))
        super().fdatasync(fd)
        self._remember(Event(Kind.FLUSHED, file, number))

    def rename(self, source: Path, target: Path) -> None:
        names = source.name, target.name
        with self._lock:  # renames are remembered in the order in which they took place
            file = source.stat().st_ino
            super().rename(source, target)
            self.events.append(Event(Kind.RENAMED, file, names=names))

    def sync_folder(self, path: Path) -> None:
        number = self._next()
        self._remember(Event(Kind.SYNCING, number=number))
        super().sync_folder(path)
        self._remember(Event(Kind.SYNCED, number=number))

    def _file(self, fd: int) -> int:
        stat = os.fstat(fd)
        self.sizes.setdefault(stat.st_ino, stat.st_size)
        return stat.st_ino

    def _next(self) -> int:
        with self._lock:
            self._number += 1
            return self._number

    def _remember(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)


@dataclass
class FileState:
    content: bytearray
    pending: dict[int, Event] = field(default_factory=dict)
    """Begun and not durable, by number."""
    landed: set[int] = field(default_factory=set)
    was_flushed: bool = False

    def after(self, rng: random.Random, share: float) -> bytes:
        """What may be there if the power is cut now."""
        if not self.was_flushed and rng.random() < 0.2:
            return b""
        content = bytearray(self.content)
        for write in self.pending.values():
            for begin in range(0, len(write.data), SECTOR):
                if rng.random() < share:
                    at = write.offset + begin
                    content[at : at + SECTOR] = write.data[begin : begin + SECTOR]
        return bytes(content)


class Disk:
    """What is durable after a part of the events."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self._files = {file: FileState(bytearray(size)) for file, size in sizes.items()}
        self._names: dict[int, str] = {}
        self._renames: list[tuple[int, str]] = []
        self._covered: dict[int, set[int]] = {}
        """By flush that has begun, the writes that it makes durable."""
        self._syncs: dict[int, int] = {}
        """By flush of the folder that has begun, how many names had been changed."""
        self._num_durable = 0

    def play(self, event: Event) -> None:
        match event.kind:
            case Kind.BEGUN:
                self._files[event.file].pending[event.number] = event
            case Kind.LANDED:
                self._files[event.file].landed.add(event.number)
            case Kind.FLUSHING:
                self._covered[event.number] = set(self._files[event.file].landed)
            case Kind.FLUSHED:
                self._flushed(self._files[event.file], self._covered.pop(event.number))
            case Kind.RENAMED:
                self._names.setdefault(event.file, event.names[0])
                self._renames.append((event.file, event.names[1]))
            case Kind.SYNCING:
                self._syncs[event.number] = len(self._renames)
            case Kind.SYNCED:
                self._num_durable = max(self._num_durable, self._syncs.pop(event.number))
            case Kind.NOTED:
                pass

    def cut(self, source: Path, target: Path, rng: random.Random) -> None:
        """A folder as it may be found, made from that in which the events took place."""
        target.mkdir()
        shutil.copy(source / "folder.json", target)
        share = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        num_renamed = rng.randint(self._num_durable, len(self._renames))
        names = self._names | dict(self._renames[:num_renamed])
        for file, name in names.items():
            (target / name).write_bytes(self._files[file].after(rng, share))

    def _flushed(self, file: FileState, covered: set[int]) -> None:
        file.was_flushed = True
        for number in sorted(covered & file.pending.keys()):
            write = file.pending.pop(number)
            file.content[write.offset : write.offset + len(write.data)] = write.data
