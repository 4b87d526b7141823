"""Waiting for an event, and not for ever: the event, the time, and the waiter's own end above all."""

from __future__ import annotations

import asyncio

import pytest

from protocol.timer import set_within
from tests.patience import NEVER_S


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
