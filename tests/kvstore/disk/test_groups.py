"""Several groups of writes under way: they are written while one is made durable, and fall with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.disk.base import Health
from tests.kvstore.disk.faulty import faulty, stuck, until_it_hangs
from tests.kvstore.disk.tiers import Stand, found_in, opened, written


async def until_landed(stand: Stand, num_objects: int) -> None:
    """So many objects are on disk, durable or not."""
    log = stand.tier._log
    while sum(each.num_records for each in log.segments.values()) < num_objects:  # noqa: ASYNC110 - no event says so
        await asyncio.sleep(0)


async def test_groups_are_written_while_one_before_is_made_durable(tmp_path: Path) -> None:
    calls, options = faulty("sync")
    async with opened(tmp_path, options) as stand:
        assert await stand.put([written(0)]) == [True]
        with stuck(calls):
            first = asyncio.create_task(stand.put([written(1)]))
            await until_it_hangs(calls)
            second = asyncio.create_task(stand.put([written(2)]))
            await until_landed(stand, 3)
            third = asyncio.create_task(stand.put([written(3)]))
            await until_landed(stand, 4)
            assert not any(task.done() for task in (first, second, third))
        assert await asyncio.gather(first, second, third) == [[True]] * 3
        for number in range(4):
            assert await stand.get(written(number).object) == bytes(written(number).memory)
    assert len(await found_in(tmp_path)) == 4


@pytest.mark.parametrize("cancelled", [False, True])
async def test_what_follows_a_failed_flush_fails_with_it_and_neither_comes_back(
    tmp_path: Path, cancelled: bool
) -> None:
    calls, options = faulty("sync")
    async with opened(tmp_path, options) as stand:
        assert await stand.put([written(0)]) == [True]
        with stuck(calls):
            calls.num_to_fail = 1
            first = asyncio.create_task(stand.put([written(1)]))
            await until_it_hangs(calls)
            second = asyncio.create_task(stand.put([written(2)]))
            await until_landed(stand, 3)
            if cancelled:
                second.cancel()
        assert await first == [False]
        if cancelled:
            with pytest.raises(asyncio.CancelledError):
                await second
        else:
            assert await second == [False]
        assert stand.tier.health is Health.READ_ONLY
        await stand.tier.check()
        assert await stand.put([written(3)]) == [True]
    assert await found_in(tmp_path) == {written(0).object, written(3).object}
