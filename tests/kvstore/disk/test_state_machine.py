"""Compares a disk tier with a dict over any order of writes, reads, releases, forgets, compactions and restarts."""

import asyncio
import dataclasses
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonserve.kvstore.disk.base import DiskObject
from tests.kvstore.disk.tiers import CAPACITY, SMALL, Stand, opened, written
from tests.thoroughness import any_order

T = TypeVar("T")

PICKS = st.lists(st.integers(0, 999), max_size=5)


class TierMachine(RuleBasedStateMachine):
    """A tier and its model: `contents` has the durable objects, `perhaps` the released ones that a restart may find."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp())
        self.stack = AsyncExitStack()
        self.contents: dict[DiskObject, bytes] = {}
        self.perhaps: dict[DiskObject, bytes] = {}
        self.number = 0

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    @initialize(encrypted=st.booleans(), flushed_at_once=st.booleans())
    def begin(self, encrypted: bool, flushed_at_once: bool) -> None:
        key_file = self.folder / "key"
        key_file.write_bytes(bytes(range(32)))
        self.options = dataclasses.replace(
            SMALL, key_file=key_file if encrypted else None, sync_interval_s=0.0 if flushed_at_once else 1.0
        )
        self.stand = self.run(self.open())

    async def open(self) -> Stand:
        return await self.stack.enter_async_context(opened(self.folder / "tier", self.options, CAPACITY))

    @rule(lengths=st.lists(st.integers(0, 30_000), min_size=1, max_size=6))
    def write(self, lengths: list[int]) -> None:
        numbers = range(self.number + 1, self.number + 1 + len(lengths))
        self.number += len(lengths)
        writes = [written(n, length, generation=n) for n, length in zip(numbers, lengths, strict=True)]
        room = self.stand.tier.usage().live + sum(map(self.stand.tier.space, lengths))
        fits = room <= self.stand.tier.live_limit
        durable = self.run(self.stand.put(writes))
        # Large objects leave the ends of segments unused, and so did the large ones among earlier writes.
        largest = max(*lengths, *(about.length for about in self.contents), 0)
        assert all(durable) or not fits or largest > 4000
        self.contents |= {w.object: bytes(w.memory) for w, done in zip(writes, durable, strict=True) if done}

    @rule(pick=st.integers(0, 999))
    def read(self, pick: int) -> None:
        for about in self.some([pick]):
            assert self.run(self.stand.get(about)) == self.contents[about]

    @rule(picks=PICKS)
    def release_some(self, picks: list[int]) -> None:
        for about in self.some(picks):
            self.perhaps[about] = self.contents.pop(about)
            self.run(self.released(about))

    async def released(self, about: DiskObject) -> None:
        self.stand.release(about)

    @rule(picks=PICKS)
    def forget_some(self, picks: list[int]) -> None:
        for about in self.some(picks):
            del self.contents[about]
            self.run(self.stand.forget(about))

    def some(self, picks: list[int]) -> list[DiskObject]:
        """Picks existing objects by index: their number may depend on compaction's timing, the drawn data must not."""
        there = list(self.contents)
        return list(dict.fromkeys(there[pick % len(there)] for pick in picks)) if there else []

    @rule()
    def restart(self) -> None:
        self.run(self.stack.aclose())
        self.stack = AsyncExitStack()
        self.stand = self.run(self.open())
        found = set(self.stand.owner.places)
        assert set(self.contents) <= found
        back = found - set(self.contents)
        assert back <= set(self.perhaps)
        self.contents |= {about: self.perhaps.pop(about) for about in back}
        self.perhaps.clear()  # compacted away

    @invariant()
    def is_valid(self) -> None:
        if hasattr(self, "stand"):
            self.run(self.stand.settled())
            self.stand.validate()
            assert set(self.stand.owner.places) == set(self.contents)

    def teardown(self) -> None:
        for about, content in self.contents.items():
            assert self.run(self.stand.get(about)) == content
        self.run(self.stack.aclose())
        self.loop.close()
        shutil.rmtree(self.folder)


TestTier = any_order(TierMachine, 25)
