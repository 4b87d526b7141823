"""A process that writes, forgets and lets compaction run until it is killed; says what is certain on stdout.

Lines: `+ number generation` once it is written, `? …` before it is forgotten, `- …` once that is durable.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
from pathlib import Path

from kvstore.disk.base import DiskObject, DiskWrite
from kvstore.disk.tier import DiskOptions
from tests.kvstore.disk.tiers import SMALL, Stand, opened, written

LENGTHS = (100, 5_000, 12_000, 30_000)
KEPT = 8
"""Objects at a time, most of what the tier may hold."""


def object_of(number: int) -> DiskWrite:
    return written(number, LENGTHS[number % len(LENGTHS)], generation=number)


def say(sign: str, abouts: list[DiskObject]) -> None:
    for about in abouts:
        sys.stdout.write(f"{sign} {about.generation}\n")
    sys.stdout.flush()


async def work(stand: Stand, first: int) -> None:
    rng = random.Random(first)
    held = [about for about in stand.owner.places if about.generation < first]
    number = first
    while True:
        writes = [object_of(number + each) for each in range(rng.randrange(1, 6))]
        number += len(writes)
        durable = await stand.put(writes)
        new = [w.object for w, done in zip(writes, durable, strict=True) if done]
        say("+", new)
        held += new
        rng.shuffle(held)
        gone = [held.pop() for _ in range(max(0, len(held) - KEPT))]
        say("?", gone)
        for about in gone:
            stand.release(about)
        await stand.tier.forget(gone)
        say("-", gone)


async def main() -> None:
    # As in a node: most of it is not flushed when the process dies, which costs nothing.
    options = dataclasses.replace(SMALL, sync_interval_s=DiskOptions().sync_interval_s)
    async with opened(Path(sys.argv[1]), options) as stand:
        await work(stand, int(sys.argv[2]))


if __name__ == "__main__":
    asyncio.run(main())
