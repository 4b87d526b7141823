"""Tiers over temporary folders, and a model of what they must hold."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from kvstore.disk.base import DiskObject, DiskRead, DiskWrite, Health, Place
from kvstore.disk.tier import DiskOptions, SsdTier
from protocol.keys import BlockKey

SEGMENT = 64 * 2**10
CAPACITY = 8 * SEGMENT
SMALL = DiskOptions(segment_bytes=SEGMENT, num_threads=2, sync_interval_s=0.0)
NO_RING = "needs a kernel that permits io_uring, and pip install 'moonserve[uring]'"


def content_of(number: int, length: int) -> bytes:
    return random.Random(number).randbytes(length)


def written(number: int, length: int = 5000, *, generation: int = 1, tenant: str = "") -> DiskWrite:
    """The object of a number; its bytes follow from number and generation."""
    content = content_of(number * 1000 + generation, length)
    about = DiskObject(
        key=BlockKey(number.to_bytes(16, "little")),
        parent=BlockKey((number - 1).to_bytes(16, "little")) if number % 3 else None,
        length=length,
        checksum=xxh3_64_intdigest(content),
        generation=generation,
        tenant=tenant,
    )
    return DiskWrite(object=about, memory=memoryview(content))


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

    async def get(self, about: DiskObject) -> bytes | None:
        memory = bytearray(about.length)
        read = DiskRead(object=about, place=self.owner.places[about], memory=memoryview(memory))
        (good,) = await self.tier.read([read])
        return bytes(memory) if good else None

    def release(self, about: DiskObject) -> None:
        self.tier.release(self.owner.places.pop(about))

    async def forget(self, about: DiskObject) -> None:
        self.release(about)
        await self.tier.forget([about])

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
        for place in self.owner.places.values():
            assert log.is_live(place)


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
