"""A routed channel: when it dials, what happens to calls when the lean connection ends, and how it closes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from protocol.errors import PeerLost
from protocol.lean import routed
from protocol.lean.routed import LEAN_HEADER, LeanAddresses, RoutedChannel
from protocol.lean.server import LeanServer
from protocol.pb import kvstore_pb2_grpc
from protocol.rpc import TOKEN_HEADER, RpcServer
from tests.patience import NEVER_S, PATIENCE_S
from tests.protocol.lean.scripted import EXISTS, LEASE, LEASE_PATH, TOKEN, ScriptedStore, stub_of

NOBODY = LeanAddresses("lean://127.0.0.1:1", "lean+unix://nobody").metadata()


@pytest.fixture
async def over_grpc() -> ScriptedStore:
    """What the gRPC server serves. It does not name a lean address: a test says when the channel learns one."""
    return ScriptedStore()


@pytest.fixture
async def channel(over_grpc: ScriptedStore) -> AsyncIterator[RoutedChannel]:
    server = RpcServer(TOKEN)
    kvstore_pb2_grpc.add_KvStoreServicer_to_server(over_grpc, server.grpc)
    address = await server.start("127.0.0.1", 0)
    channel = RoutedChannel(grpc.aio.insecure_channel(address), TOKEN, None)
    yield channel
    await channel.close()
    await server.stop(0)


def call(channel: RoutedChannel, method: str, request: Any) -> asyncio.Task[Any]:
    metadata = ((TOKEN_HEADER, TOKEN),)
    return asyncio.create_task(getattr(stub_of(channel), method)(request, timeout=PATIENCE_S, metadata=metadata))


async def dial(channel: RoutedChannel, metadata: Any) -> None:
    """Tells the channel a lean address and waits for the end of its attempt to dial it."""
    channel.learn(metadata)
    assert channel._dialling is not None
    await asyncio.wait([channel._dialling])


async def dial_server(channel: RoutedChannel, lean: LeanServer) -> LeanAddresses:
    addresses = LeanAddresses(*await lean.start("127.0.0.1"))
    await dial(channel, addresses.metadata())
    assert channel.connection_for(LEASE_PATH) is not None
    return addresses


async def test_calls_under_way_are_lost_with_the_lean_server_and_later_ones_travel_over_grpc(
    channel: RoutedChannel, lean: LeanServer, store: ScriptedStore, over_grpc: ScriptedStore
) -> None:
    await dial_server(channel, lean)
    calls = [call(channel, "Lease", LEASE) for _ in range(3)]
    for _ in calls:
        await store.begun.get()
    await lean.stop(0)
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, PeerLost)
    assert list((await call(channel, "Exists", EXISTS)).present) == [True]
    over_grpc.go.set()
    await call(channel, "Lease", LEASE)
    assert over_grpc.begun.get_nowait() == "l"


async def test_a_connection_that_stands_is_kept_whatever_addresses_replies_name(
    channel: RoutedChannel, lean: LeanServer, store: ScriptedStore
) -> None:
    await dial_server(channel, lean)
    connection, pending = channel.connection_for(LEASE_PATH), call(channel, "Lease", LEASE)
    await store.begun.get()
    channel._dial_again_at = 0.0
    channel.learn(NOBODY)
    assert channel._dialling is None
    store.go.set()
    await pending
    assert channel.connection_for(LEASE_PATH) is connection


async def test_dialling_after_a_loss_leaves_calls_over_grpc_alone(
    channel: RoutedChannel, lean: LeanServer, store: ScriptedStore, over_grpc: ScriptedStore
) -> None:
    """The old connection is let go, and a call that went over gRPC meanwhile ends with its own reply."""
    await dial_server(channel, lean)
    await lean.stop(0)
    over = LeanServer(TOKEN)
    over.add("KvStore", store)
    pending = call(channel, "Lease", LEASE)
    await over_grpc.begun.get()
    channel._dial_again_at = 0.0
    await dial_server(channel, over)
    over_grpc.go.set()
    await pending
    await call(channel, "Exists", EXISTS)
    await over.stop(0)


async def test_failed_dials_leave_calls_to_grpc_and_are_logged_once_in_a_row(
    channel: RoutedChannel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routed, "RETRY_S", 0.0)
    caplog.set_level(logging.INFO, logger=routed.log.name)
    for _ in range(3):
        await dial(channel, NOBODY)
        assert (await call(channel, "Exists", EXISTS)).present
    assert caplog.text.count("calls stay with gRPC") == 1


async def test_an_address_that_failed_is_not_dialled_again_at_once(channel: RoutedChannel) -> None:
    await dial(channel, NOBODY)
    channel.learn(NOBODY)
    assert channel._dialling is None


@pytest.mark.parametrize("text", ["", "host lean+unix://name", "here lean+unix://n lean://h:1 x"])
async def test_metadata_that_name_no_lean_address_are_ignored(channel: RoutedChannel, text: str) -> None:
    channel.learn([(LEAN_HEADER, text), ("another", "a b c"), (f"{LEAN_HEADER}-bin", b"a b c")])
    assert channel._dialling is None


async def test_closing_during_a_dial_ends_it_and_its_connection(
    channel: RoutedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "DIAL_S", NEVER_S)
    met, ended = asyncio.Event(), asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.set()
        try:
            while await reader.read(4096):
                pass
        except ConnectionError:
            pass
        ended.set()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        channel.learn([(LEAN_HEADER, f"elsewhere lean+unix://nobody lean://127.0.0.1:{port}")])
        async with asyncio.timeout(PATIENCE_S):
            await met.wait()
            await channel.close()
            await ended.wait()
    assert channel._dialling is None


async def test_closing_ends_calls_over_lean_refuses_later_ones_and_dials_no_more(
    channel: RoutedChannel, lean: LeanServer, store: ScriptedStore
) -> None:
    addresses = await dial_server(channel, lean)
    pending = call(channel, "Lease", LEASE)
    await store.begun.get()
    await channel.close()
    for lost in (pending, call(channel, "Exists", EXISTS)):
        with pytest.raises(PeerLost, match="was closed"):
            await lost
    assert await store.cancelled.get() == "l"
    channel._dial_again_at = 0.0
    channel.learn(addresses.metadata())
    assert channel._dialling is None
