"""Waiting for a process's end, tasks beside a block, and the timer of a state's deadlines."""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import StaleLease
from protocol.process import Lifecycle, running
from protocol.timer import Timer
from tests.patience import PATIENCE_S


async def test_a_process_waits_until_it_is_told_to_stop() -> None:
    lifecycle = Lifecycle(None)
    async with running(asyncio.Event().wait()) as other:
        waiting = asyncio.create_task(lifecycle.until_stopped(other))
        await asyncio.sleep(0)
        assert not waiting.done()
        lifecycle.stopping.set()
        await asyncio.wait_for(waiting, PATIENCE_S)
        assert not other.done()
    assert other.cancelled()


async def test_what_ends_a_watched_task_ends_the_wait() -> None:
    async def refused() -> None:
        raise StaleLease("a newer incarnation is registered")

    async with running(refused()) as task:
        with pytest.raises(StaleLease):
            await asyncio.wait_for(Lifecycle(None).until_stopped(task), PATIENCE_S)


async def test_a_cancelled_wait_leaves_the_watched_task_alone() -> None:
    async with running(asyncio.Event().wait()) as other:
        waiting = asyncio.create_task(Lifecycle(None).until_stopped(other))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not other.done()


async def test_what_is_under_way_has_all_its_time_until_somebody_hurries() -> None:
    lifecycle, idle = Lifecycle(None), asyncio.Event()
    lifecycle.stop_when_idle()
    assert lifecycle.stopping.is_set()
    waiting = asyncio.create_task(lifecycle.drained(idle.wait(), timeout_s=0.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    lifecycle.stop()
    assert not await asyncio.wait_for(waiting, PATIENCE_S)


@pytest.mark.parametrize("times", [1, 2])
async def test_who_has_all_the_time_ends_with_what_is_under_way(times: int) -> None:
    """However often it was asked to end when idle."""
    lifecycle, idle = Lifecycle(None), asyncio.Event()
    for _ in range(times):
        lifecycle.stop_when_idle()
    waiting = asyncio.create_task(lifecycle.drained(idle.wait(), timeout_s=0.0))
    for _ in range(5):
        await asyncio.sleep(0)
    idle.set()
    assert await asyncio.wait_for(waiting, PATIENCE_S)


async def test_a_stop_is_not_taken_back() -> None:
    lifecycle = Lifecycle(None)
    lifecycle.stop()
    lifecycle.stop_when_idle()
    never = asyncio.Event()
    assert not await asyncio.wait_for(lifecycle.drained(never.wait(), 0.0), PATIENCE_S)


async def test_a_timer_rings_at_the_last_instant_it_was_set_to() -> None:
    now, rings = 100.0, asyncio.Queue[str]()
    timer = Timer(lambda: rings.put_nowait("ring"), lambda: now)
    timer.set(1000.0)
    timer.set(99.0)  # past: rings at once
    assert await asyncio.wait_for(rings.get(), PATIENCE_S) == "ring"
    timer.set(99.0)  # set anew after it rang
    assert await asyncio.wait_for(rings.get(), PATIENCE_S) == "ring"


async def test_a_timer_that_was_unset_does_not_ring() -> None:
    rings: list[str] = []
    timer = Timer(lambda: rings.append("ring"), lambda: 0.0)
    timer.set(0.0)
    timer.set(None)
    after = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, after.set)
    await asyncio.wait_for(after.wait(), PATIENCE_S)
    assert rings == []
