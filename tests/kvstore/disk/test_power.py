"""Power loss at any moment: no wrong byte is read, flushed objects are found, and removed objects stay removed.

Model of the disk: a write is durable once a flush of its file that started after the write has ended. Until then any
combination of its sectors may be on disk, also if the write has not returned. Names become durable in their order, at
the latest with a flush of the folder. A file that was never flushed may be empty. `folder.json` is written with flushes
of its own and is taken as it is.
"""

import asyncio
import dataclasses
import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.kvstore.disk import compaction
from moonserve.kvstore.disk.base import DiskObject, DiskWrite, Pin
from moonserve.kvstore.disk.io.segment_file import FileCalls
from moonserve.protocol.kv_blocks import BlockKey
from tests.kvstore.disk.tiers import SEGMENT, SMALL, Stand, for_ever, opened, written
from tests.thoroughness import examples

SECTOR = 512
LENGTHS = (100, 4_096, 5_000, 12_000, 30_000)
KEPT = 8
"""Number of objects held at a time, most of the tier's capacity."""
NUM_CUTS = 12
"""Number of power cuts per history; they are cheap compared to the history."""


@dataclass(eq=False)
class Write:
    offset: int
    data: bytes
    landed: bool = False


@dataclass
class File:
    """A file's durable content, and the writes that have started and are not durable."""

    content: bytearray
    pending: list[Write] = field(default_factory=list)
    was_flushed: bool = False

    def landed(self) -> list[Write]:
        """Returns the writes that a flush starting now makes durable."""
        return [write for write in self.pending if write.landed]

    def flushed(self, covered: Sequence[Write]) -> None:
        self.was_flushed = True
        for write in covered:
            if write in self.pending:
                self.pending.remove(write)
                self.content[write.offset : write.offset + len(write.data)] = write.data

    def after(self, rng: random.Random, share: float) -> bytes:
        """Returns random content that the file may have if the power is cut now."""
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
    """Executes file calls and records them as `events`. A replay of the first events computes the data that is durable
    then. The history starts with an empty folder."""

    def __init__(self) -> None:
        self.events: list[Callable[[], object]] = []
        self._files: dict[int, File] = {}  # by inode
        self._names: dict[int, str] = {}
        self._renames: list[tuple[int, str]] = []
        self._num_durable = 0
        """Number of renames that flushes of the folder have made durable."""
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
        with self._lock:  # records renames in the order in which they happen
            inode = source.stat().st_ino
            super().rename(source, target)
            self.events.append(lambda: self._names.setdefault(inode, source.name))
            self.events.append(lambda: self._renames.append((inode, target.name)))

    def sync_folder(self, path: Path) -> None:
        num_changed: list[int] = []
        self.events.append(lambda: num_changed.append(len(self._renames)))
        super().sync_folder(path)
        self.events.append(lambda: self._synced(*num_changed))

    def cut(self, source: Path, target: Path, rng: random.Random) -> None:
        """Writes a folder as it may be after a power cut, from `source`, in which the events took place."""
        target.mkdir()
        shutil.copy(source / "folder.json", target)
        share = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        num_renamed = rng.randint(self._num_durable, len(self._renames))
        for inode, name in (self._names | dict(self._renames[:num_renamed])).items():
            (target / name).write_bytes(self._files[inode].after(rng, share))

    def _file(self, fd: int) -> File:
        stat = os.fstat(fd)
        return self._files.setdefault(stat.st_ino, File(bytearray(stat.st_size)))

    def _synced(self, num_changed: int) -> None:
        self._num_durable = max(self._num_durable, num_changed)


def object_of(number: int) -> DiskWrite:
    return written(number, LENGTHS[number % len(LENGTHS)], generation=number)


class Owner:
    """Writes, forgets, pins and releases objects at random. The tier's answers are events of the disk, too: replayed,
    they tell which objects must and must not be found after a cut. `strict`: the tier flushes after every group."""

    def __init__(self, stand: Stand, disk: Disk, rng: random.Random, *, strict: bool) -> None:
        self.certain: set[int] = set()
        self.forgotten: set[int] = set()
        self.pinned: set[BlockKey] = set()
        self._stand = stand
        self._disk = disk
        self._rng = rng
        self._strict = strict
        self._held: list[DiskObject] = []
        self._numbers = itertools.count(1)

    async def step(self) -> None:
        sizes = [self._rng.randrange(1, 4) for _ in range(self._rng.randrange(1, 4))]
        await asyncio.gather(*(self._put(size) for size in sizes))
        self._rng.shuffle(self._held)
        excess = [self._held.pop() for _ in range(max(0, len(self._held) - KEPT))]
        await asyncio.gather(self._forget(excess[::2]), self._release(excess[1::2]))
        if self._rng.random() < 0.3:
            held = list(self._held)
            assert await self._stand.tier.flush()
            self._certain(held)
        if self._held and self._rng.random() < 0.3:
            about = self._rng.choice(self._held)
            await self._stand.tier.repin([dataclasses.replace(about, generation=next(self._numbers), pin=Pin.HARD)])
            self._disk.events.append(lambda: self.pinned.add(about.key))

    def _certain(self, objects: Iterable[DiskObject]) -> None:
        numbers = {about.generation for about in objects}
        self._disk.events.append(lambda: self.certain.update(numbers))

    async def _put(self, size: int) -> None:
        writes = [object_of(next(self._numbers)) for _ in range(size)]
        done = await self._stand.put(writes)
        there = [write.object for write, good in zip(writes, done, strict=True) if good]
        self._certain(there if self._strict else ())
        self._held += there

    async def _release(self, objects: list[DiskObject]) -> None:
        numbers = {about.generation for about in objects}
        self._disk.events.append(lambda: self.certain.difference_update(numbers))
        for about in objects:
            self._stand.release(about)

    async def _forget(self, objects: list[DiskObject]) -> None:
        await self._release(objects)
        if await self._stand.tier.forget(objects):
            numbers = {about.generation for about in objects}
            self._disk.events.append(lambda: self.forgotten.update(numbers))

    async def check(self, folder: Path) -> None:
        async with opened(folder, dataclasses.replace(SMALL, ring=False)) as stand:
            found = {about.generation for about in stand.owner.places}
            assert self.certain <= found
            assert not self.forgotten & found
            damaged: set[int] = set()
            for about in list(stand.owner.places):
                expected = object_of(about.generation)
                assert about.pin is Pin.HARD or about.key not in self.pinned
                assert dataclasses.replace(about, pin=Pin.NONE) == expected.object
                content = await stand.get(about)
                if content is None:  # as compaction does
                    stand.release(about)
                    damaged.add(about.generation)
                else:
                    assert content == bytes(expected.memory)
            assert not self.certain & damaged
        async with opened(folder, dataclasses.replace(SMALL, ring=False)) as stand:
            assert found - damaged <= {about.generation for about in stand.owner.places} <= found


async def lived(folder: Path, disk: Disk, rng: random.Random, *, strict: bool) -> Owner:
    """Runs a random history on the disk and returns its owner."""
    options = dataclasses.replace(SMALL, calls=disk, ring=False, sync_interval_s=0.0 if strict else 1.0, sleep=for_ever)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "_BATCH_BYTES", rng.choice([1, SEGMENT]))
        async with opened(folder, options) as stand:
            owner = Owner(stand, disk, rng, strict=strict)
            for _ in range(rng.randrange(1, 25)):
                await owner.step()
    return owner


@settings(max_examples=examples(10), deadline=None)
@given(seed=st.integers(0, 2**32), strict=st.booleans())
def test_a_power_loss_costs_only_unwritten_objects(
    tmp_path_factory: pytest.TempPathFactory, seed: int, strict: bool
) -> None:
    """After a power cut, only data not yet durable is missing, also if compaction moves objects meanwhile."""
    rng = random.Random(seed)
    folder, disk = tmp_path_factory.mktemp("power"), Disk()
    owner = asyncio.run(lived(folder / "living", disk, rng, strict=strict))
    played = 0
    for number, cut in enumerate(sorted(rng.choices(range(len(disk.events) + 1), k=NUM_CUTS))):
        for event in disk.events[played:cut]:
            event()
        played = cut
        found = folder / f"cut-{number}"
        disk.cut(folder / "living", found, rng)
        asyncio.run(owner.check(found))
