"""A flush every interval: writes do not wait for it, removals do, and it comes without being asked."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from pathlib import Path

from kvstore.disk.base import Health
from kvstore.disk.tier import DiskOptions
from tests.kvstore.disk.faulty import FaultyCalls, stuck, until_it_hangs
from tests.kvstore.disk.tiers import SEGMENT, SMALL, found_in, opened, written

INTERVAL_S = 7.0
LARGE = 16 * SEGMENT
"""Bytes of a segment: all that a test writes fits into one, whose end flushes nothing."""
AGAIN = dataclasses.replace(SMALL, segment_bytes=LARGE)


class Ticks:
    """Intervals of flushes end when they are told to; nothing else does."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[None] = asyncio.Queue()
        self.ends: asyncio.Queue[None] = asyncio.Queue()

    async def sleep(self, seconds: float) -> None:
        if seconds != INTERVAL_S:
            await asyncio.Event().wait()
        self.begun.put_nowait(None)
        await self.ends.get()


def lazy() -> tuple[FaultyCalls, Ticks, DiskOptions]:
    calls, ticks = FaultyCalls("sync"), Ticks()
    options = dataclasses.replace(
        SMALL, calls=calls, sleep=ticks.sleep, sync_interval_s=INTERVAL_S, segment_bytes=LARGE
    )
    return calls, ticks, options


async def test_writes_are_answered_before_they_are_flushed_and_flushed_once_an_interval(tmp_path: Path) -> None:
    calls, ticks, options = lazy()
    async with opened(tmp_path, options, capacity=8 * LARGE) as stand:
        for interval in range(3):
            before = calls.num_flushes
            for number in range(2):
                assert await stand.put([written(10 * interval + number, 100)]) == [True]
            await ticks.begun.get()
            assert calls.num_flushes == before
            with stuck(calls):
                ticks.ends.put_nowait(None)
                await until_it_hangs(calls)
            assert await stand.tier.flush()
            assert calls.num_flushes == before + 1
        assert ticks.begun.empty()


async def test_a_removal_waits_for_its_flush_and_writes_do_not_wait_for_removals(tmp_path: Path) -> None:
    calls, _, options = lazy()
    async with opened(tmp_path, options, capacity=8 * LARGE) as stand:
        await stand.put([written(1), written(2)])
        with stuck(calls):
            removal = asyncio.create_task(stand.forget(written(1).object))
            await until_it_hangs(calls)
            assert await stand.put([written(3)]) == [True]
            assert await stand.get(written(3).object) == bytes(written(3).memory)
            assert not removal.done()
        await removal
    assert await found_in(tmp_path, AGAIN, capacity=8 * LARGE) == {written(2).object, written(3).object}


async def test_removals_at_the_same_time_share_flushes(tmp_path: Path) -> None:
    """One is under way, all others wait for the next one."""
    calls, _, options = lazy()
    async with opened(tmp_path, options, capacity=8 * LARGE) as stand:
        await stand.put([written(number, 100) for number in range(8)])
        assert await stand.tier.flush()
        before = calls.num_flushes
        with stuck(calls):
            first = asyncio.create_task(stand.forget(written(0, 100).object))
            await until_it_hangs(calls)
            others = [asyncio.create_task(stand.forget(written(number, 100).object)) for number in range(1, 8)]
            for number in range(3):
                await stand.put([written(100 + number, 100)])
        await asyncio.gather(first, *others)
        assert calls.num_flushes - before <= 3  # the second may begin before all have landed
    assert len(await found_in(tmp_path, AGAIN, capacity=8 * LARGE)) == 3


async def test_nothing_that_must_last_follows_a_failed_flush_in_its_segment(tmp_path: Path) -> None:
    calls, ticks, options = lazy()
    changed = asyncio.Event()
    async with opened(tmp_path, options, capacity=8 * LARGE) as stand:
        stand.tier._health._changed = lambda health, reason: changed.set()
        await stand.put([written(1), written(2)])
        active = stand.tier._log.active
        assert active is not None
        await ticks.begun.get()
        calls.errors["sync"] = errno.EIO
        ticks.ends.put_nowait(None)
        await changed.wait()
        assert stand.tier.health is Health.READ_ONLY
        assert await stand.put([written(3)]) == [False]
        assert not await stand.tier.forget([written(1).object])
        assert await stand.get(written(2).object) == bytes(written(2).memory)
        calls.errors.clear()
        await stand.tier.check()
        assert await stand.put([written(4)]) == [True]
        assert stand.tier._log.active is not active
        del stand.owner.places[written(1).object]
    assert await found_in(tmp_path, AGAIN, capacity=8 * LARGE) == {written(2).object, written(4).object}


async def test_an_orderly_stop_flushes_everything(tmp_path: Path) -> None:
    calls, _, options = lazy()
    async with opened(tmp_path, options, capacity=8 * LARGE) as stand:
        await stand.put([written(1)])
        assert calls.num_flushes == 0
    assert calls.num_flushes >= 2  # the log, then its footer
