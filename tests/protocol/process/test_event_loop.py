"""Tests of background tasks, timers, and waits for events."""

import asyncio
import gc

import pytest

from moonserve.protocol.process.event_loop import BackgroundTasks, Timer, wait_event
from tests.patience import NEVER_S, PATIENCE_S


async def test_timer_rings_at_the_last_set_time() -> None:
    now, rings = 100.0, asyncio.Queue[str]()
    timer = Timer(lambda: rings.put_nowait("ring"), lambda: now)
    timer.set(1000.0)
    timer.set(99.0)  # past: rings at once
    assert await asyncio.wait_for(rings.get(), PATIENCE_S) == "ring"
    timer.set(99.0)  # set anew after it rang
    assert await asyncio.wait_for(rings.get(), PATIENCE_S) == "ring"


async def test_unset_timer_does_not_ring() -> None:
    rings: list[str] = []
    timer = Timer(lambda: rings.append("ring"), lambda: 0.0)
    timer.set(0.0)
    timer.set(None)
    after = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, after.set)
    await asyncio.wait_for(after.wait(), PATIENCE_S)
    assert rings == []


async def test_background_task_is_held_until_it_ends() -> None:
    tasks, begun, ended = BackgroundTasks(), asyncio.Event(), asyncio.Event()

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
    await asyncio.sleep(0)  # lets the task's callbacks run
    assert len(tasks) == 0


async def test_cancel_waits_until_all_tasks_have_cleaned_up() -> None:
    tasks, order = BackgroundTasks(), list[str]()

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


async def test_wait_event_returns_whether_event_was_set() -> None:
    event = asyncio.Event()
    assert not await wait_event(event, 0.001)
    assert not await wait_event(event, -1.0)
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_event(event, NEVER_S)
    assert await wait_event(event, 0.0)


@pytest.mark.parametrize("turns", range(6))
async def test_cancellation_together_with_the_event_is_not_lost(turns: int) -> None:
    """A cancellation ends the task however many turns of the loop after the event it comes."""
    event = asyncio.Event()

    async def waits_then_rests() -> None:
        await wait_event(event, NEVER_S)
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
