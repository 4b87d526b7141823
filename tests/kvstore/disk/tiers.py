"""Disk tiers over temporary folders whose disk can hang or fail, and a model of their owner, the catalog."""

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

from moonserve.kvstore.disk.base import DiskObject, DiskRead, DiskWrite, Health, Place
from moonserve.kvstore.disk.io.segment_file import FileCalls
from moonserve.kvstore.disk.log_state import Segment
from moonserve.kvstore.disk.tier import DiskOptions, SsdTier
from moonserve.protocol.kv_blocks import BlockKey

SEGMENT = 64 * 2**10
CAPACITY = 8 * SEGMENT
SMALL = DiskOptions(segment_bytes=SEGMENT, num_threads=2, sync_interval_s=0.0)
NO_RING = "needs a kernel that permits io_uring"


def written(number: int, length: int = 5000, *, generation: int = 1, tenant: str = "") -> DiskWrite:
    """Returns the write of object `number`, whose bytes follow from number and generation."""
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
    """Stands in for the catalog: knows the place of each wanted object, and follows moves."""

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
    """A disk tier and its owner."""

    def __init__(self, tier: SsdTier, owner: Owner) -> None:
        self.tier = tier
        self.owner = owner

    async def put(self, writes: Sequence[DiskWrite]) -> list[bool]:
        """Writes objects and records their places. Returns for each whether it is durable."""
        places = await self.tier.write(writes)
        for write, place in zip(writes, places, strict=True):
            if place is not None:
                self.owner.places[write.object] = place
        return [place is not None for place in places]

    def read_of(self, about: DiskObject, memory: bytearray | memoryview | None = None) -> DiskRead:
        """Returns a read of an object from its current place, into new memory unless `memory` is given."""
        into = memoryview(bytearray(about.length) if memory is None else memory)
        return DiskRead(object=about, place=self.owner.places[about], memory=into)

    async def get(self, about: DiskObject) -> bytes | None:
        read = self.read_of(about)
        (good,) = await self.tier.read([read])
        return bytes(read.memory) if good else None

    async def holds(self, *writes: DiskWrite) -> bool:
        """Returns True if all of them read back as they were written."""
        return all([await self.get(write.object) == bytes(write.memory) for write in writes])

    def release(self, about: DiskObject) -> None:
        self.tier.release(self.owner.places.pop(about))

    async def forget(self, about: DiskObject) -> None:
        self.release(about)
        await self.tier.forget([about])

    async def sealed(self) -> Segment:
        """Seals the first segment if it is active. Returns it once its footer is written."""
        log = self.tier._log
        if log.active is log.segments[1]:
            self.tier._segments.seal(self.tier._writer._landed_in)
        await self.settled()
        return log.segments[1]

    async def settled(self) -> None:
        """Waits for footers, the preparation of new files, and compaction in flight."""
        await self.tier._compactor.wait_until_idle()
        while await self.tier._segments.wait_for_footer():
            await self.tier._compactor.wait_until_idle()
        if (prepared := self.tier._segments._prepared) is not None:
            await asyncio.wait([prepared])

    def validate(self) -> None:
        log = self.tier._log
        log.validate()
        assert self.tier._scratch.num_borrowed == 0
        if self.tier._ring is not None:
            self.tier._ring.validate()
            assert not self.tier._ring._under_way
        assert all(map(log.is_live, self.owner.places.values()))


@contextlib.asynccontextmanager
async def opened(folder: Path, options: DiskOptions = SMALL, capacity: int = CAPACITY) -> AsyncIterator[Stand]:
    """Opens and recovers a tier; its owner has the objects found. At the end the tier is settled and validated."""
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
    """Returns the objects that a restart finds. Further arguments are passed on to `opened`."""
    async with opened(folder, *how, **options) as stand:
        return set(stand.owner.places)


async def for_ever(seconds: float) -> None:
    await asyncio.Event().wait()


class Ticks:
    """Replaces `sleep`: sleeps of `interval_s` end only when a test ends them, other sleeps never."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.begun: asyncio.Queue[None] = asyncio.Queue()
        self.ends: asyncio.Queue[None] = asyncio.Queue()

    async def sleep(self, seconds: float) -> None:
        if seconds != self._interval_s:
            await asyncio.Event().wait()
        self.begun.put_nowait(None)
        await self.ends.get()


class FaultyCalls(FileCalls):
    """File calls that can fail. Calls of one `kind` ("read", "write" or "sync") block while `answers` is clear."""

    def __init__(self, kind: str = "") -> None:
        self._kind = kind
        self.answers = threading.Event()
        self.answers.set()
        self.hangs = threading.Semaphore(0)
        self.errors: dict[str, int] = {}
        """Error number with which all calls of a kind fail."""
        self.num_to_fail = 0
        """Number of blocked calls that fail in the end although they did their work."""
        self.bad_offset = -1  # reads that include it fail
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


@contextlib.asynccontextmanager
async def failing(
    folder: Path, kind: str = "", capacity: int = CAPACITY, **options: Any
) -> AsyncIterator[tuple[FaultyCalls, Stand]]:
    """Opens a tier whose file calls can hang or fail. It makes them in threads, without io_uring."""
    calls = FaultyCalls(kind)
    async with opened(folder, dataclasses.replace(SMALL, calls=calls, ring=False, **options), capacity) as stand:
        yield calls, stand


@contextlib.contextmanager
def stuck(calls: FaultyCalls) -> Iterator[None]:
    calls.answers.clear()
    try:
        yield
    finally:
        calls.answers.set()


async def until_it_hangs(calls: FaultyCalls) -> None:
    await asyncio.to_thread(calls.hangs.acquire)
