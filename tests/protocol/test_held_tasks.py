"""Tasks that are held: until they end, and all together to their end."""

from __future__ import annotations

import asyncio
import gc

import pytest

from protocol.held_tasks import HeldTasks


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
