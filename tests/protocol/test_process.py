"""A process's tasks, timers and waits: until it is told to stop, beside a block, and not for ever."""

from __future__ import annotations

import asyncio
import gc

import pytest

from protocol.errors import StaleLease
from protocol.held_tasks import HeldTasks
from protocol.process import Lifecycle, running
from protocol.timer import Timer, set_within
from tests.patience import NEVER_S, PATIENCE_S


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


async def test_a_task_that_nobody_else_holds_goes_on() -> None:
    tasks, begun, ended = HeldTasks(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: waiting.set_result(None))
        begun.set()
        await waiting
        ended.set()

    task = tasks.start(work())
    assert list(tasks) == [task]
    del task
    await begun.wait()
    gc.collect()
    await ended.wait()
    await asyncio.sleep(0)  # its callbacks
    assert len(tasks) == 0


async def test_cancelling_waits_until_each_has_put_its_things_in_order() -> None:
    tasks, order = HeldTasks(), list[str]()

    async def work(error: Exception | None) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("put away")
            if error is not None:
                raise error

    failing = tasks.start(work(ValueError("of its own")))
    tasks.start(work(None))
    await asyncio.sleep(0)
    await tasks.cancel()
    assert order == ["put away"] * 2
    assert len(tasks) == 0
    with pytest.raises(ValueError, match="of its own"):
        failing.result()


async def test_it_tells_whether_the_event_came() -> None:
    event = asyncio.Event()
    assert not await set_within(event, 0.001)
    assert not await set_within(event, -1.0)
    asyncio.get_running_loop().call_soon(event.set)
    assert await set_within(event, NEVER_S)
    assert await set_within(event, 0.0)


@pytest.mark.parametrize("turns", range(6))
async def test_an_end_that_comes_together_with_the_event_is_not_lost(turns: int) -> None:
    """However many turns of the loop lie between them, unless it has returned already."""
    event = asyncio.Event()

    async def waits_then_rests() -> None:
        await set_within(event, NEVER_S)
        await asyncio.Event().wait()

    task = asyncio.create_task(waits_then_rests())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
