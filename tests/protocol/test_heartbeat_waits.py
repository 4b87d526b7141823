"""What a member waits for between heartbeats: a change, or the interval, and its end above all."""

from __future__ import annotations

import asyncio

import pytest

from protocol.membership import BlockLog, Membership
from protocol.pb import conductor_pb2
from protocol.rpc import Channels


@pytest.mark.parametrize("turns", range(6))
async def test_an_end_that_comes_together_with_a_change_is_not_lost(turns: int) -> None:
    """However many turns of the loop lie between them."""
    channels = Channels("token")
    member = Membership(
        channels,
        "127.0.0.1:1",
        conductor_pb2.RegisterRequest(),
        conductor_pb2.Load,
        BlockLog(),
    )
    task = asyncio.create_task(member._wait_for_change())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    member.wake()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    await channels.close()
