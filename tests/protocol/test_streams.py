"""Streams from a worker to gateways, beyond what the workers' own tests see of them."""

from __future__ import annotations

import asyncio

from protocol.errors import PeerLost
from protocol.ids import GatewayId, RequestId
from protocol.request import Token
from protocol.streams import GatewayStreams
from tests.patience import PATIENCE_S

GATEWAY = GatewayId("g")


async def test_a_stream_that_ends_after_the_close_gives_nobody_up() -> None:
    """A worker that changes its role lives on while the streams of its earlier role end."""
    lost: list[GatewayId] = []
    streams = GatewayStreams(lost.append, grace_s=0.0)
    events = streams.events(GATEWAY)
    await anext(events)
    streams.close()
    failures: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: failures.append(what))
    await events.aclose()
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, done.set)  # behind whatever was to be called then
    await done.wait()
    assert not lost
    assert not failures


async def test_a_stream_begins_with_how_many_batches_were_taken_before_it() -> None:
    streams = GatewayStreams(lambda gateway_id: None)
    first = streams.events(GATEWAY)
    assert (await anext(first)).standing.num_batches == 0
    await anext(first)  # whatever waited; here nothing
    streams.send(GATEWAY, failures=[(RequestId("r"), PeerLost("gone"))])
    taken = await anext(first)
    assert taken.failures
    assert not taken.HasField("standing")
    second = streams.events(GATEWAY)
    begun = (await anext(second)).standing
    assert (begun.times_given_up, begun.num_batches) == (0, 2)
    await first.aclose()
    await second.aclose()
    streams.close()


async def test_a_gateway_that_was_given_up_is_told_when_it_comes_back() -> None:
    lost: asyncio.Queue[GatewayId] = asyncio.Queue()
    streams = GatewayStreams(lost.put_nowait, grace_s=0.0)
    streams.send(GATEWAY, failures=[(RequestId("r"), PeerLost("gone"))])
    for times in (1, 2):  # without a stream, and when its stream has ended
        assert await asyncio.wait_for(lost.get(), PATIENCE_S) == GATEWAY
        back = streams.events(GATEWAY)
        assert (await anext(back)).standing.times_given_up == times
        await back.aclose()
    streams.close()


async def test_a_finished_stream_gives_what_waits_and_ends() -> None:
    """So does one that is opened then: its gateway has not heard of the end yet."""
    streams = GatewayStreams(lambda _: None)
    events = streams.events(GATEWAY)
    await anext(events)
    token = Token(request_id=RequestId("r"), index=0, token_id=7)
    streams.send(GATEWAY, tokens=[token])
    streams.finish()
    async with asyncio.timeout(PATIENCE_S):
        assert [len(batch.tokens) async for batch in events] == [1]
        assert [len(batch.tokens) async for batch in streams.events(GATEWAY)] == [0, 0]
    streams.close()
