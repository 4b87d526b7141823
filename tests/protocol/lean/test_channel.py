"""The asyncio client: cancellation, reconnecting, many calls on one connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protocol.errors import DeadlineExceeded, Overloaded, PeerLost
from protocol.lean.served import MAX_WAITING_CALLS
from protocol.rpc import Channels
from tests.patience import NEVER_S, PATIENCE_S
from tests.protocol.lean.scripted import EXISTS, LEASE, TOKEN, ScriptedStore, stub_of


@pytest.fixture
async def channels() -> AsyncIterator[Channels]:
    channels = Channels(TOKEN)
    yield channels
    await channels.close()


@pytest.fixture
async def stub(address: str, channels: Channels) -> Any:
    return stub_of(channels.to(address))


async def test_a_cancelled_call_cancels_its_handler(stub: Any, store: ScriptedStore, channels: Channels) -> None:
    call = asyncio.create_task(channels.call(stub.Lease, LEASE, timeout_s=NEVER_S))
    await store.begun.get()
    call.cancel()
    assert await asyncio.wait_for(store.cancelled.get(), PATIENCE_S) == "l"
    assert (await channels.call(stub.Exists, EXISTS, timeout_s=PATIENCE_S)).present


async def test_a_call_cancelled_while_dialling_leaves_the_dial_to_others(stub: Any, channels: Channels) -> None:
    first, second = (asyncio.create_task(channels.call(stub.Exists, EXISTS, timeout_s=PATIENCE_S)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).present


async def test_closing_a_channel_ends_its_calls_and_cancels_their_handlers(
    stub: Any, store: ScriptedStore, channels: Channels
) -> None:
    call = asyncio.create_task(channels.call(stub.Lease, LEASE, timeout_s=PATIENCE_S))
    await store.begun.get()
    await channels.close()
    with pytest.raises(PeerLost):
        await call
    assert await store.cancelled.get() == "l"
    with pytest.raises(PeerLost, match="was closed"):
        await stub.Exists(EXISTS, timeout=PATIENCE_S)


async def test_closing_a_channel_ends_the_calls_that_wait_for_its_connection(channels: Channels) -> None:
    """With an error, as all others: a task must not take it for its own cancellation."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        stub = stub_of(channels.to(f"lean://127.0.0.1:{port}"))
        call = asyncio.create_task(channels.call(stub.Exists, EXISTS, timeout_s=NEVER_S))
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await channels.close()
            with pytest.raises(PeerLost, match="was closed"):
                await call


async def test_more_waiting_calls_than_one_client_may_have_are_refused(
    stub: Any, store: ScriptedStore, channels: Channels
) -> None:
    calls = [
        asyncio.create_task(channels.call(stub.Lease, LEASE, timeout_s=PATIENCE_S))
        for _ in range(MAX_WAITING_CALLS + 1)
    ]
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = done
    assert isinstance(refused.exception(), Overloaded)
    assert (await channels.call(stub.Exists, EXISTS, timeout_s=PATIENCE_S)).present
    store.go.set()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_deadlines_end_calls_each_in_its_own_time(stub: Any, store: ScriptedStore, channels: Channels) -> None:
    patient = asyncio.create_task(channels.call(stub.Lease, LEASE, timeout_s=PATIENCE_S))
    for timeout_s in (0.06, 0.03, 0.001):
        with pytest.raises(DeadlineExceeded):
            await channels.call(stub.Lease, LEASE, timeout_s=timeout_s)
    store.go.set()
    assert (await patient).segment_id == 0


async def test_streams_are_refused_by_name(stub: Any) -> None:
    with pytest.raises(NotImplementedError, match="over gRPC"):
        stub.Subscribe(None)
