"""Tests of the streams of tokens to gateways: their first batch, keepalives, their end, and gateways given up."""

import asyncio

import pytest

from moonserve.protocol.errors import PeerLost
from moonserve.protocol.pb import worker_pb2
from moonserve.protocol.request import GatewayId, RequestId, Token
from moonserve.worker.token_streams import GatewayStreams
from tests.patience import PATIENCE_S

GATEWAY = GatewayId("g")


async def test_stream_that_ends_after_close_gives_no_gateway_up() -> None:
    """A stream that ends after `close` gives no gateway up, as when a worker changes its role and old streams end."""
    lost: list[GatewayId] = []
    streams = GatewayStreams(lost.append, grace_s=0.0)
    events = streams.events(GATEWAY)
    await anext(events)
    streams.close()
    failures: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: failures.append(what))
    await events.aclose()
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, done.set)  # runs after all pending callbacks
    await done.wait()
    assert not lost
    assert not failures


async def test_stream_begins_with_number_of_batches_taken_before() -> None:
    streams = GatewayStreams(lambda gateway_id: None)
    first = streams.events(GATEWAY)
    assert (await anext(first)).standing.num_batches == 0
    await anext(first)  # the waiting events, here none
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


async def test_idle_stream_sends_keepalives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonserve.worker.token_streams.KEEPALIVE_S", 0.0)
    streams = GatewayStreams(lambda gateway_id: None)
    events = streams.events(GATEWAY)
    await anext(events)
    assert await anext(events) == worker_pb2.EventBatch()
    await events.aclose()
    streams.close()


async def test_returning_gateway_learns_that_it_was_given_up() -> None:
    lost: asyncio.Queue[GatewayId] = asyncio.Queue()
    streams = GatewayStreams(lost.put_nowait, grace_s=0.0)
    streams.send(GATEWAY, failures=[(RequestId("r"), PeerLost("gone"))])
    for times in (1, 2):  # without a stream, and when its stream has ended
        assert await asyncio.wait_for(lost.get(), PATIENCE_S) == GATEWAY
        back = streams.events(GATEWAY)
        assert (await anext(back)).standing.times_given_up == times
        await back.aclose()
    streams.close()


async def test_finished_stream_sends_waiting_events_and_ends() -> None:
    """After `finish`, a stream gives the waiting events and ends. So does a stream of a gateway that missed the end."""
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
