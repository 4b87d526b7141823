"""Disks that are full, read-only, broken or gone: requests go on, the health names the cause, recovery is noticed."""

import asyncio
import dataclasses
import errno
import shutil
from pathlib import Path

import pytest

from moonserve.kvstore.disk import health
from moonserve.kvstore.disk.base import PAGE, Health
from moonserve.kvstore.disk.io.format import page_of
from tests.kvstore.disk.tiers import SMALL, Ticks, failing, found_in, objects, opened, stuck, until_it_hangs, written


@pytest.mark.parametrize(("what", "error"), [("write", errno.EROFS), ("write", errno.EIO), ("sync", errno.EIO)])
async def test_a_disk_that_turns_read_only_still_serves_and_heals(tmp_path: Path, what: str, error: int) -> None:
    """An object whose write failed can be written again; a restart does not find a failed attempt."""
    async with failing(tmp_path) as (calls, stand):
        await stand.put([written(1)])
        calls.errors[what] = error
        assert await stand.put([written(2), written(4)]) == [False, False]
        assert stand.tier.health is Health.READ_ONLY
        assert await stand.holds(written(1))
        assert await stand.put([written(3)]) == [False]
        ((seen, reason),) = stand.owner.health
        assert seen is Health.READ_ONLY
        assert "cannot be written to" in reason
        calls.errors.clear()
        await stand.tier.check()
        assert stand.tier.health is Health.GOOD
        assert await stand.put([written(2)]) == [True]
    assert await found_in(tmp_path) == objects(1, 2)


async def test_objects_forgotten_while_the_disk_fails_are_forgotten_later(tmp_path: Path) -> None:
    async with failing(tmp_path) as (calls, stand):
        await stand.put([written(1), written(2)])
        calls.errors["write"] = errno.EIO
        await stand.forget(written(1).object)
        calls.errors.clear()
        await stand.tier.check()
    assert await found_in(tmp_path) == objects(2)


async def test_a_segment_that_goes_before_a_failed_read_is_tried_again_is_a_miss(tmp_path: Path) -> None:
    async with failing(tmp_path, "read") as (calls, stand):
        calls.num_to_fail = 9  # every blocked call
        writes = [written(1), written(2)]
        assert await stand.put(writes) == [True, True]
        await stand.sealed()
        reads = [stand.read_of(write.object) for write in writes]
        with stuck(calls):
            reading = asyncio.create_task(stand.tier.read(reads))
            await until_it_hangs(calls)
            for write in writes:
                stand.release(write.object)  # lets compaction delete the segment
            while stand.tier._segments.files:  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0)
        assert await reading == [False, False]


async def test_one_bad_sector_costs_its_object_only(tmp_path: Path) -> None:
    async with failing(tmp_path) as (calls, stand):
        writes = [written(number) for number in range(4)]
        await stand.put(writes)
        calls.bad_offset = page_of(stand.owner.places[writes[1].object]) * PAGE + 5000
        got = await asyncio.gather(*(stand.get(write.object) for write in writes))
        assert [content is not None for content in got] == [True, False, True, True]
        assert stand.tier.health is Health.GOOD
        assert stand.tier.counters["errors_EIO"] >= 1
        calls.bad_offset = -1


async def test_a_disk_that_cannot_be_read_at_all_fails_and_heals(tmp_path: Path) -> None:
    async with failing(tmp_path) as (calls, stand):
        await stand.put([written(1)])
        calls.errors["read"] = errno.EIO
        for _ in range(health.READ_ERRORS_IN_A_ROW):
            assert await stand.get(written(1).object) is None
        assert stand.tier.health is Health.FAILED
        assert await stand.put([written(2)]) == [False]
        await stand.tier.check()
        assert stand.tier.health is Health.FAILED
        calls.errors.clear()
        await stand.tier.check()
        assert stand.tier.health is Health.GOOD
        assert await stand.holds(written(1))


async def test_a_folder_that_vanishes_fails_the_tier_but_no_request(tmp_path: Path) -> None:
    async with opened(tmp_path / "tier") as stand:
        await stand.put([written(1)])
        shutil.move(tmp_path / "tier", tmp_path / "elsewhere")
        await stand.tier.check()
        assert stand.tier.health is Health.FAILED
        assert await stand.get(written(1).object) is None
        assert await stand.put([written(2)]) == [False]
        await stand.tier.forget([written(1).object])
        assert "is gone" in stand.owner.health[-1][1] or "cannot be read" in stand.owner.health[-1][1]
        shutil.move(tmp_path / "elsewhere", tmp_path / "tier")
        await stand.tier.check()
        assert stand.tier.health is Health.GOOD
        assert await stand.holds(written(1))


async def test_hangs_of_the_disk_are_found_without_calls(tmp_path: Path) -> None:
    ticks, changed = Ticks(SMALL.check_every_s), asyncio.Event()
    async with opened(tmp_path / "tier", dataclasses.replace(SMALL, sleep=ticks.sleep)) as stand:
        stand.tier._health._changed = lambda health, reason: changed.set()
        shutil.move(tmp_path / "tier", tmp_path / "elsewhere")
        ticks.ends.put_nowait(None)
        await changed.wait()
        assert stand.tier.health is Health.FAILED
