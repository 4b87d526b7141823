"""Tiers over temporary folders whose disk can be made to hang or to fail, and a model of what they must hold."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import random
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from kvstore.disk.base import DiskObject, DiskRead, DiskWrite, Health, Place
from kvstore.disk.files import FileCalls
from kvstore.disk.log import Segment
from kvstore.disk.tier import DiskOptions, SsdTier
from protocol.keys import BlockKey

SEGMENT = 64 * 2**10
CAPACITY = 8 * SEGMENT
SMALL = DiskOptions(segment_bytes=SEGMENT, num_threads=2, sync_interval_s=0.0)
NO_RING = "needs a kernel that permits io_uring, and pip install 'moonserve[uring]'"


def written(number: int, length: int = 5000, *, generation: int = 1, tenant: str = "") -> DiskWrite:
    """The object of a number; its bytes follow from number and generation."""
    content = random.Random(number * 1000 + generation).randbytes(length)
    about = DiskObject(
        key=BlockKey(number.to_bytes(16, "little")),
        parent=BlockKey((number - 1).to_bytes(16, "little")) if number % 3 else None,
        length=length,
        checksum=xxh3_64_intdigest(content),
        generation=generation,
        tenant=tenant,
    )
    return DiskWrite(object=about, memory=memoryview(content))


def objects(*numbers: int) -> set[DiskObject]:
    return {written(number).object for number in numbers}


@dataclass
class Owner:
    """Plays the catalog: knows where each wanted object lies, and follows moves."""

    places: dict[DiskObject, Place] = field(default_factory=dict)
    health: list[tuple[Health, str]] = field(default_factory=list)
    moves: int = 0

    def moved(self, about: DiskObject, source: Place, target: Place) -> bool:
        identity = about.key, about.generation  # its pin may have changed since it was written
        known = next((each for each in self.places if (each.key, each.generation) == identity), None)
        if known is None or self.places[known] != source:
            return False
        self.places[known] = target
        self.moves += 1
        return True

    def health_changed(self, health: Health, reason: str) -> None:
        self.health.append((health, reason))


class Stand:
    """A tier and its owner."""

    def __init__(self, tier: SsdTier, owner: Owner) -> None:
        self.tier = tier
        self.owner = owner

    async def put(self, writes: Sequence[DiskWrite]) -> list[bool]:
        """Which of them are durable now."""
        places = await self.tier.write(writes)
        for write, place in zip(writes, places, strict=True):
            if place is not None:
                self.owner.places[write.object] = place
        return [place is not None for place in places]

    def read_of(self, about: DiskObject, memory: bytearray | memoryview | None = None) -> DiskRead:
        """From where it lies, into memory of its own if none is given."""
        into = memoryview(bytearray(about.length) if memory is None else memory)
        return DiskRead(object=about, place=self.owner.places[about], memory=into)

    async def get(self, about: DiskObject) -> bytes | None:
        read = self.read_of(about)
        (good,) = await self.tier.read([read])
        return bytes(read.memory) if good else None

    async def holds(self, *writes: DiskWrite) -> bool:
        """Whether all of them read back as they were written."""
        return all([await self.get(write.object) == bytes(write.memory) for write in writes])

    def release(self, about: DiskObject) -> None:
        self.tier.release(self.owner.places.pop(about))

    async def forget(self, about: DiskObject) -> None:
        self.release(about)
        await self.tier.forget([about])

    async def sealed(self) -> Segment:
        """The first segment, with its footer."""
        log = self.tier._log
        if log.active is log.segments[1]:
            self.tier._segments.seal(self.tier._writer._landed_in)
        await self.settled()
        return log.segments[1]

    async def settled(self) -> None:
        """Waits for footers, files to come and compaction that are under way."""
        await self.tier._compactor.settled()
        while await self.tier._segments.sealed():
            await self.tier._compactor.settled()
        if (prepared := self.tier._segments._prepared) is not None:
            await asyncio.wait([prepared])

    def validate(self) -> None:
        log = self.tier._log
        log.validate()
        assert self.tier._scratch.num_borrowed == 0
        if self.tier._ring is not None:
            self.tier._ring.validate()
            assert self.tier._ring.num_under_way == 0
        assert all(map(log.is_live, self.owner.places.values()))


@contextlib.asynccontextmanager
async def opened(folder: Path, options: DiskOptions = SMALL, capacity: int = CAPACITY) -> AsyncIterator[Stand]:
    """Opened and recovered; what was found is with its owner."""
    owner = Owner()
    tier = await SsdTier.open(folder, capacity, options, owner.moved, owner.health_changed)
    try:
        async for piece in tier.recover(lambda share: None):
            for about, place in piece:
                assert about not in owner.places, "given twice"
                owner.places[about] = place
        stand = Stand(tier, owner)
        yield stand
        await stand.settled()
        stand.validate()
    finally:
        await tier.close()


async def found_in(folder: Path, *how: Any, **options: Any) -> set[DiskObject]:
    """By a restart; `opened` says how."""
    async with opened(folder, *how, **options) as stand:
        return set(stand.owner.places)


# Disks that do not answer for a while, or fail


class Clock:
    """Stands still until it is told the time."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


async def for_ever(seconds: float) -> None:
    await asyncio.Event().wait()


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
        self.bad_offset = -1  # what reads it fails
        self.num_flushes = 0
        self._lock = threading.Lock()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._call("write"):
            return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset <= self.bad_offset < offset + sum(map(len, buffers)):
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


def faulty(kind: str = "", **options: Any) -> tuple[FaultyCalls, DiskOptions]:
    """Through threads, whose calls can be made to fail."""
    calls = FaultyCalls(kind)
    return calls, dataclasses.replace(SMALL, calls=calls, ring=False, **options)


@contextlib.contextmanager
def stuck(calls: FaultyCalls) -> Iterator[None]:
    calls.answers.clear()
    try:
        yield
    finally:
        calls.answers.set()


async def until_it_hangs(calls: FaultyCalls) -> None:
    await asyncio.to_thread(calls.hangs.acquire)
