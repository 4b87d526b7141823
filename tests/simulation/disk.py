"""Simulated disk of a pool node: implements the product's `DiskTier` over a medium that outlives the process.

A write during which its process dies may or may not be on the medium. A medium that fails comes back empty.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from moonserve.kvstore.disk.base import DiskObject, DiskRead, DiskUsage, DiskWrite, Health, HealthChanged, Moved, Place
from moonserve.protocol.kv_blocks import BlockKey, checksum
from tests.kvstore.hardware import Disk

PIECE = 8  # objects per batch of recovery
BAD_WRITES, BAD_READS = 0.02, 0.01


@dataclass
class Medium(Disk):
    """Contents of a disk, and the objects that must not reappear."""

    contents: dict[Place, bytes] = field(default_factory=dict)
    forgotten: dict[BlockKey, int] = field(default_factory=dict)  # by key: latest forgotten generation

    def put(self, write: DiskWrite) -> Place:
        place = self.write(write.object)
        self.contents[place] = bytes(write.memory)
        self.sweep()
        return place

    def sweep(self) -> None:
        """Drops forgotten objects, so that recovery does not find them."""
        for place, about in list(self.kept.items()):
            if about.generation <= self.forgotten.get(about.key, -1):
                del self.kept[place]

    def lose(self) -> None:
        self.kept.clear()
        self.contents.clear()


class SimulatedDisk:
    """`DiskTier` of one life of a node. Operations take random times; a few fail."""

    def __init__(self, medium: Medium, rng: random.Random, moved: Moved, health_changed: HealthChanged) -> None:
        self.medium = medium
        self.health = Health.GOOD
        self.counters: dict[str, int] = {}
        self._unanswered: set[Place | None] = set()
        """Places whose writers have no answer yet. Compaction does not move them."""
        self._rng = rng
        self._moved = moved
        self._health_changed = health_changed

    @property
    def live_limit(self) -> int:
        return self.medium.live_limit

    def space(self, length: int) -> int:
        return self.medium.space(length)

    def takes(self, length: int) -> bool:
        return self.medium.takes(length)

    def usage(self) -> DiskUsage:
        live = sum(self.space(len(self.medium.contents[place])) for place in self.medium.live)
        limit = self.live_limit
        return DiskUsage(capacity=limit, live=live, dead=0, free=limit - live)

    def fail(self) -> None:
        """Loses all contents and reports the failure."""
        if self.health is Health.GOOD:
            self.health = Health.FAILED
            self.medium.lose()
            self._health_changed(self.health, "it is lost")

    async def recover(self, progress: Callable[[float], None]) -> AsyncIterator[list[tuple[DiskObject, Place]]]:
        found = self.medium.recover()
        self._rng.shuffle(found)
        for begin in range(0, len(found), PIECE):
            await asyncio.sleep(self._rng.uniform(0, 0.05))
            progress(begin / len(found))
            yield found[begin : begin + PIECE]
        progress(1.0)

    async def write(self, writes: Sequence[DiskWrite]) -> list[Place | None]:
        places = await asyncio.gather(*map(self._write, writes))
        self._unanswered.difference_update(places)
        return list(places)

    async def _write(self, write: DiskWrite) -> Place | None:
        await self._late()
        assert checksum([write.memory]) == write.object.checksum, "it changed while it was written"
        if self.health is not Health.GOOD or self._rng.random() < BAD_WRITES:
            return None
        place = self.medium.put(write)
        self._unanswered.add(place)
        await self._late()  # it is written but not yet acknowledged
        return place

    async def read(self, reads: Sequence[DiskRead]) -> list[bool]:
        return list(await asyncio.gather(*map(self._read, reads)))

    async def _read(self, read: DiskRead) -> bool:
        content = self.medium.contents.get(read.place)
        await self._late()
        if content is None or self.health is not Health.GOOD or self._rng.random() < BAD_READS:
            return False
        read.memory[:] = content
        return checksum([read.memory]) == read.object.checksum

    def release(self, place: Place) -> None:
        self.medium.release(place)

    async def forget(self, objects: Sequence[DiskObject]) -> bool:
        for about in objects:
            known = self.medium.forgotten.get(about.key, -1)
            self.medium.forgotten[about.key] = max(known, about.generation)
        self.medium.sweep()
        await self._late()
        return self.health is Health.GOOD

    async def repin(self, changes: Sequence[DiskObject]) -> None:
        pins = {change.key: change for change in changes}
        for place, about in self.medium.kept.items():
            change = pins.get(about.key)
            if change is not None and about.generation < change.generation:
                self.medium.kept[place] = replace(about, pin=change.pin)
        await self._late()

    async def compact(self) -> None:
        """Compacts from time to time, without end: reclaims released places and moves some of the others."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.2, 1.5))
            medium = self.medium
            medium.compact()
            medium.contents = {place: medium.contents[place] for place in medium.kept}
            for old in sorted(medium.live & medium.kept.keys() - self._unanswered)[:3]:
                about, new = medium.kept[old], medium.move(old)
                medium.contents[new] = medium.contents[old]
                medium.moved(old, new, wanted=self._moved(about, old, new))

    async def close(self) -> None:
        """Does nothing: no operation is in flight."""

    async def _late(self) -> None:
        await asyncio.sleep(self._rng.expovariate(50))
