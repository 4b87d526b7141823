"""Flushes: one per interval or one per group of writes, the calls that wait for them, and the effects of a failure."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from moonserve.kvstore.disk.base import Health
from tests.kvstore.disk import tiers

INTERVAL_S = 7.0
CAPACITY = 128 * tiers.SEGMENT


@contextlib.asynccontextmanager
async def lazy(folder: Path) -> AsyncIterator[tuple[tiers.FaultyCalls, tiers.Ticks, tiers.Stand]]:
    """Opens a tier with a flush per interval and with a segment that no test fills, since its end would flush."""
    ticks = tiers.Ticks(INTERVAL_S)
    options = {"sleep": ticks.sleep, "sync_interval_s": INTERVAL_S, "segment_bytes": 16 * tiers.SEGMENT}
    async with tiers.failing(folder, "sync", CAPACITY, **options) as (calls, stand):
        yield calls, ticks, stand


async def test_writes_are_answered_before_they_are_flushed_and_flushed_once_an_interval(tmp_path: Path) -> None:
    async with lazy(tmp_path) as (calls, ticks, stand):
        for interval in range(3):
            before = calls.num_flushes
            for number in range(2):
                assert await stand.put([tiers.written(10 * interval + number, 100)]) == [True]
            await ticks.begun.get()
            assert calls.num_flushes == before
            with tiers.stuck(calls):
                ticks.ends.put_nowait(None)
                await tiers.until_it_hangs(calls)
            assert await stand.tier.flush()
            assert calls.num_flushes == before + 1
        assert ticks.begun.empty()


async def test_a_removal_waits_for_its_flush_and_writes_do_not_wait_for_removals(tmp_path: Path) -> None:
    async with lazy(tmp_path) as (calls, _, stand):
        await stand.put([tiers.written(1), tiers.written(2)])
        with tiers.stuck(calls):
            removal = asyncio.create_task(stand.forget(tiers.written(1).object))
            await tiers.until_it_hangs(calls)
            assert await stand.put([tiers.written(3)]) == [True]
            assert await stand.holds(tiers.written(3))
            assert not removal.done()
        await removal
    assert await tiers.found_in(tmp_path, capacity=CAPACITY) == tiers.objects(2, 3)


async def test_removals_at_the_same_time_share_flushes(tmp_path: Path) -> None:
    """Removals that arrive during a flush share the next one."""
    async with lazy(tmp_path) as (calls, _, stand):
        await stand.put([tiers.written(number) for number in range(8)])
        assert await stand.tier.flush()
        before = calls.num_flushes
        with tiers.stuck(calls):
            first = asyncio.create_task(stand.forget(tiers.written(0).object))
            await tiers.until_it_hangs(calls)
            others = [asyncio.create_task(stand.forget(tiers.written(number).object)) for number in range(1, 8)]
            for number in (100, 101, 102):
                await stand.put([tiers.written(number)])
        await asyncio.gather(first, *others)
        assert calls.num_flushes - before <= 3  # the second may start before all writes have landed
    assert await tiers.found_in(tmp_path, capacity=CAPACITY) == tiers.objects(100, 101, 102)


async def test_no_durable_record_follows_a_failed_flush_in_its_segment(tmp_path: Path) -> None:
    changed = asyncio.Event()
    async with lazy(tmp_path) as (calls, ticks, stand):
        stand.tier._health._changed = lambda health, reason: changed.set()
        await stand.put([tiers.written(1), tiers.written(2)])
        active = stand.tier._log.active
        await ticks.begun.get()
        calls.errors["sync"] = errno.EIO
        ticks.ends.put_nowait(None)
        await changed.wait()
        assert stand.tier.health is Health.READ_ONLY
        assert await stand.put([tiers.written(3)]) == [False]
        assert not await stand.tier.forget([tiers.written(1).object])
        assert await stand.holds(tiers.written(2))
        calls.errors.clear()
        await stand.tier.check()
        assert await stand.put([tiers.written(4)]) == [True]
        assert stand.tier._log.active is not active
        del stand.owner.places[tiers.written(1).object]
    assert await tiers.found_in(tmp_path, capacity=CAPACITY) == tiers.objects(2, 4)


async def test_an_orderly_stop_flushes_everything(tmp_path: Path) -> None:
    async with lazy(tmp_path) as (calls, _, stand):
        await stand.put([tiers.written(1)])
        assert calls.num_flushes == 0
    assert calls.num_flushes >= 2  # of the log, then of its footer


async def until_landed(stand: tiers.Stand, num_objects: int) -> None:
    """Waits until `num_objects` are written to disk, durable or not."""
    log = stand.tier._log
    while sum(each.num_records for each in log.segments.values()) < num_objects:  # noqa: ASYNC110 - no event says so
        await asyncio.sleep(0)


async def test_groups_are_written_while_one_before_is_made_durable(tmp_path: Path) -> None:
    async with tiers.failing(tmp_path, "sync") as (calls, stand):
        assert await stand.put([tiers.written(0)]) == [True]
        with tiers.stuck(calls):
            first = asyncio.create_task(stand.put([tiers.written(1)]))
            await tiers.until_it_hangs(calls)
            second = asyncio.create_task(stand.put([tiers.written(2)]))
            await until_landed(stand, 3)
            third = asyncio.create_task(stand.put([tiers.written(3)]))
            await until_landed(stand, 4)
            assert not any(task.done() for task in (first, second, third))
        assert await asyncio.gather(first, second, third) == [[True]] * 3
        assert await stand.holds(*map(tiers.written, range(4)))
    assert await tiers.found_in(tmp_path) == tiers.objects(0, 1, 2, 3)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_writes_after_a_failed_flush_fail_and_do_not_return(tmp_path: Path, cancelled: bool) -> None:
    async with tiers.failing(tmp_path, "sync") as (calls, stand):
        assert await stand.put([tiers.written(0)]) == [True]
        with tiers.stuck(calls):
            calls.num_to_fail = 1
            first = asyncio.create_task(stand.put([tiers.written(1)]))
            await tiers.until_it_hangs(calls)
            second = asyncio.create_task(stand.put([tiers.written(2)]))
            await until_landed(stand, 3)
            if cancelled:
                second.cancel()
        assert await first == [False]
        [outcome] = await asyncio.gather(second, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError) if cancelled else outcome == [False]
        assert stand.tier.health is Health.READ_ONLY
        await stand.tier.check()
        assert await stand.put([tiers.written(3)]) == [True]
    assert await tiers.found_in(tmp_path) == tiers.objects(0, 3)
