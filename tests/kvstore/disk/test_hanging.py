"""A hanging disk: waiting calls fail after a time limit, and memory to which the disk may still write is kept."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from moonserve.kvstore.disk.base import Health
from moonserve.kvstore.disk.io.segment_file import FileCalls
from tests.clock import Clock
from tests.kvstore.disk import tiers
from tests.kvstore.faults.mounts import frozen, mounted_ext4

LIMIT_S = tiers.SMALL.time_limit_s


@pytest.mark.parametrize("kind", ["write", "sync"])
async def test_a_write_that_hangs_is_refused_and_never_comes_back(tmp_path: Path, kind: str) -> None:
    clock = Clock()
    async with tiers.failing(tmp_path, kind, clock=clock, sleep=tiers.for_ever) as (calls, stand):
        assert await stand.put([tiers.written(1)]) == [True]
        with tiers.stuck(calls):
            first = asyncio.create_task(stand.put([tiers.written(2)]))
            await tiers.until_it_hangs(calls)
            second = asyncio.create_task(stand.put([tiers.written(3)]))
            clock.now += LIMIT_S
            stand.tier.check_for_hang()
            assert stand.tier.health is Health.GOOD
            clock.now += 1
            stand.tier.check_for_hang()
            assert (await first, await second) == ([False], [False])
            ((seen, reason),) = stand.owner.health
            assert seen is Health.FAILED
            assert "not answered for 31 s" in reason
            assert await stand.put([tiers.written(4)]) == [False]
            stand.tier.check_for_hang()
            assert stand.tier.counters["disk_hangs"] == 1
        await stand.tier.check()
        assert stand.tier.health is Health.GOOD
        assert await stand.put([tiers.written(5)]) == [True]
    assert await tiers.found_in(tmp_path) == tiers.objects(1, 5)


async def test_a_read_that_hangs_keeps_its_memory_until_the_disk_is_done_with_it(tmp_path: Path) -> None:
    clock = Clock()
    async with tiers.failing(tmp_path, "read", clock=clock, sleep=tiers.for_ever) as (calls, stand):
        await stand.put([tiers.written(1)])
        read = stand.read_of(tiers.written(1).object)
        with tiers.stuck(calls):
            task = asyncio.create_task(stand.tier.read([read]))
            await tiers.until_it_hangs(calls)
            clock.now += LIMIT_S + 1
            stand.tier.check_for_hang()
            assert stand.tier.health is Health.FAILED
            await asyncio.sleep(0)
            assert not task.done()
            assert await stand.tier.read([read]) == [False]
        assert await task == [True]
        assert read.memory == tiers.written(1).memory


async def test_a_job_of_many_calls_is_never_overdue_while_they_return(tmp_path: Path) -> None:
    """Sixty reads of 1 s each leave a disk's health good, since each call returns in time."""
    clock = Clock()

    class Slow(FileCalls):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            clock.now += 1
            return super().preadv(fd, buffers, offset)

    options = dataclasses.replace(tiers.SMALL, calls=Slow(), clock=clock, sleep=tiers.for_ever, ring=False)
    async with tiers.opened(tmp_path, options) as stand:
        for number in range(20):
            await stand.put([tiers.written(number)])
        for number in range(60):
            assert await stand.get(tiers.written(number % 20).object) is not None
            stand.tier.check_for_hang()
        assert stand.tier.health is Health.GOOD
        stand.tier._waits.validate()


async def test_reads_in_the_ring_are_answered_at_the_limit_and_their_slots_come_back_later(tmp_path: Path) -> None:
    clock = Clock()
    async with tiers.opened(tmp_path, dataclasses.replace(tiers.SMALL, clock=clock, sleep=tiers.for_ever)) as stand:
        ring = stand.tier._ring
        if ring is None:
            pytest.skip(tiers.NO_RING)
        await stand.put([tiers.written(1)])
        read = stand.read_of(tiers.written(1).object)
        task = asyncio.create_task(stand.tier.read([read]))
        await asyncio.sleep(0)
        assert len(ring._under_way) == 1
        clock.now += LIMIT_S + 1
        stand.tier.check_for_hang()  # before the loop has seen the completion
        assert await task == [False]
        assert not any(read.memory)
        ring.validate()
        while ring._under_way:  # noqa: ASYNC110 - only the kernel knows when
            await asyncio.sleep(0)
        await stand.tier.check()
        assert await stand.holds(tiers.written(1))


async def test_a_file_system_that_is_frozen_costs_the_disk_and_no_request(tmp_path: Path) -> None:
    """On a really frozen file system, where writes block in the kernel, a write fails and the disk recovers later."""
    clock = Clock()
    with mounted_ext4(tmp_path / "disk") as disk:
        async with tiers.opened(disk, dataclasses.replace(tiers.SMALL, clock=clock, sleep=tiers.for_ever)) as stand:
            assert await stand.put([tiers.written(1)]) == [True]
            with frozen(disk):
                task = asyncio.create_task(stand.put([tiers.written(2)]))
                while not stand.tier._longest_wait_s():
                    clock.now += 1
                    await asyncio.sleep(0)
                clock.now += LIMIT_S
                stand.tier.check_for_hang()
                assert await task == [False]
                assert stand.tier.health is Health.FAILED
            await stand.tier.check()
            assert stand.tier.health is Health.GOOD
            assert await stand.holds(tiers.written(1))
            assert await stand.put([tiers.written(3)]) == [True]
        assert await tiers.found_in(disk) == tiers.objects(1, 3)
