"""Tests of the socket clients: cancellation, reconnects, concurrent calls, idle connections, threads and time limits;
when a routed channel dials, what happens to its calls when the socket connection ends, and how it closes."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc.aio
import pytest

from moonserve.deploy.launcher.ports import free_port
from moonserve.protocol.errors import DeadlineExceeded, Overloaded, PeerLost
from moonserve.protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.rpc import frames, socket_client_sync, transport_selection
from moonserve.protocol.rpc.grpc_transport import TOKEN_HEADER, Channels, RpcServer
from moonserve.protocol.rpc.socket_client_sync import SyncChannel, SyncConnection
from moonserve.protocol.rpc.socket_server import SocketServer
from moonserve.protocol.rpc.socket_server_connection import MAX_WAITING_CALLS
from moonserve.protocol.rpc.transport_selection import LEAN_HEADER, Metadata, RoutedChannel, address_metadata
from tests.patience import NEVER_S, PATIENCE_S
from tests.protocol.rpc.scripted import EXISTS, EXISTS_PATH, LEASE, LEASE_PATH, TOKEN, ScriptedStore, stub_of


@pytest.fixture
async def stub(address: str, channels: Channels) -> Any:
    return stub_of(channels.to(address))


async def test_cancelled_call_cancels_its_handler(stub: Any, store: ScriptedStore, channels: Channels) -> None:
    call = asyncio.create_task(channels.call(stub.Lease, LEASE, timeout_s=NEVER_S))
    await store.begun.get()
    call.cancel()
    assert await asyncio.wait_for(store.cancelled.get(), PATIENCE_S) == "l"
    assert (await channels.call(stub.Exists, EXISTS, timeout_s=PATIENCE_S)).present


async def test_call_cancelled_while_dialling_does_not_cancel_the_dial(stub: Any, channels: Channels) -> None:
    first, second = (asyncio.create_task(channels.call(stub.Exists, EXISTS, timeout_s=PATIENCE_S)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).present


class Silent(contextlib.AsyncExitStack):
    """A server that never answers. `met` is set when a client connects, `ended` when its connection ends."""

    async def __aenter__(self) -> "Silent":
        self.met, self.ended = asyncio.Event(), asyncio.Event()
        server = await self.enter_async_context(await asyncio.start_server(self.serve, "127.0.0.1", 0))
        self.address = f"lean://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.met.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        self.ended.set()
        writer.close()


async def test_close_ends_calls_that_wait_for_the_connection_and_prevents_later_ones(channels: Channels) -> None:
    """Calls that wait for a connection end with PeerLost, which a task cannot take for its own cancellation."""
    async with Silent() as silent:
        stub = stub_of(channels.to(silent.address))
        call = asyncio.create_task(channels.call(stub.Exists, EXISTS, timeout_s=NEVER_S))
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            await channels.close()
            with pytest.raises(PeerLost, match="was closed"):
                await call
            with pytest.raises(PeerLost, match="was closed"):
                await stub.Exists(EXISTS, timeout=NEVER_S)


async def test_too_many_waiting_calls_of_a_client_are_refused(
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


async def test_each_call_ends_at_its_own_deadline(stub: Any, store: ScriptedStore, channels: Channels) -> None:
    patient = asyncio.create_task(channels.call(stub.Lease, LEASE, timeout_s=PATIENCE_S))
    for timeout_s in (0.06, 0.03, 0.001):
        with pytest.raises(DeadlineExceeded):
            await channels.call(stub.Lease, LEASE, timeout_s=timeout_s)
    store.go.set()
    assert (await patient).segment_id == 0


async def test_streams_are_refused_with_their_path(stub: Any) -> None:
    with pytest.raises(NotImplementedError, match="over gRPC"):
        stub.Subscribe(None)


PRESENT = kvstore_pb2.StoreExistsReply(present=[True]).SerializeToString()
REQUEST = EXISTS.SerializeToString()


async def test_idle_connection_to_restarted_server_is_replaced() -> None:
    port = free_port()
    with SyncChannel(f"lean://127.0.0.1:{port}", TOKEN) as channel:
        for _ in range(2):
            server = SocketServer(TOKEN)
            server.add("KvStore", ScriptedStore())
            await server.start("127.0.0.1", port)
            assert await asyncio.to_thread(channel.call, EXISTS_PATH, REQUEST, timeout_s=PATIENCE_S) == PRESENT
            await server.stop(0)


@pytest.mark.parametrize("spin_s", [0.0, 1e-4])
async def test_many_threads_share_one_channel(address: str, spin_s: float) -> None:
    with SyncChannel(address, TOKEN, spin_s=spin_s) as channel, ThreadPoolExecutor(8) as threads:

        def work() -> bool:
            return all(channel.call(EXISTS_PATH, REQUEST, timeout_s=PATIENCE_S) == PRESENT for _ in range(100))

        loop = asyncio.get_running_loop()
        assert all(await asyncio.gather(*(loop.run_in_executor(threads, work) for _ in range(8))))


class Clock:
    """A fake `time` of connections, moved by tests only. `limits` has the socket's timeouts in the order of setting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.limits: list[float] = []
        self.takes_s = {"_dial": 0.0, "_send": 0.0}
        time = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        monkeypatch.setattr(socket_client_sync, "time", time)
        for name in ("_dial", "_send", "_limit_to"):
            monkeypatch.setattr(SyncConnection, name, self._watched(name))

    def _watched(self, name: str) -> Callable[..., None]:
        original = getattr(SyncConnection, name)

        def run(connection: SyncConnection, *args: Any) -> None:
            original(connection, *args)
            if name == "_limit_to":
                self.limits.append(args[0])
            else:
                self.now += self.takes_s[name]

        return run


@pytest.mark.parametrize("slow", ["_dial", "_send"])
async def test_deadline_includes_time_for_dialling_and_sending(
    slow: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    with SyncChannel(address, TOKEN, spin_s=0.0) as channel:
        await asyncio.to_thread(channel.call, EXISTS_PATH, REQUEST, timeout_s=100.0)
        assert clock.limits[-1] == 100.0
        if slow == "_dial":
            channel.close()
        clock.takes_s[slow] = 60.0
        await asyncio.to_thread(channel.call, EXISTS_PATH, REQUEST, timeout_s=100.0)
        assert clock.limits[-1] == 40.0


async def test_reply_in_pieces_has_one_deadline(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, receive = Clock(monkeypatch), SyncConnection._receive_into
    pieces: list[int] = []

    def trickle(connection: SyncConnection, buffer: memoryview) -> int:
        clock.now += 1.0
        pieces.append(receive(connection, buffer[:2]))
        return pieces[-1]

    with SyncChannel(address, TOKEN, spin_s=0.0) as channel:
        await asyncio.to_thread(channel.call, EXISTS_PATH, REQUEST, timeout_s=100.0)
        monkeypatch.setattr(SyncConnection, "_receive_into", trickle)
        assert await asyncio.to_thread(channel.call, EXISTS_PATH, REQUEST, timeout_s=100.0) == PRESENT
    assert sum(pieces) == frames.REPLY.size + len(PRESENT)
    assert clock.limits[-len(pieces) :] == [100.0 - past for past in range(len(pieces))]


def test_lack_of_descriptors_raises_peer_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as exhausted, SyncChannel("lean://127.0.0.1:1", TOKEN) as channel:
        exhausted.setattr(socket, "socket", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(PeerLost, match="open files"):
            channel.call(EXISTS_PATH, REQUEST, timeout_s=PATIENCE_S)


def test_peer_that_disconnects_in_handshake_raises_peer_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        hung_up = threads.submit(lambda: server.accept()[0].close())
        address = f"lean://127.0.0.1:{server.getsockname()[1]}"
        with SyncChannel(address, TOKEN) as channel, pytest.raises(PeerLost):
            channel.call(EXISTS_PATH, REQUEST, timeout_s=PATIENCE_S)
        hung_up.result()


NOBODY = address_metadata("lean://127.0.0.1:1", "lean+unix://nobody")


@pytest.fixture
async def over_grpc() -> ScriptedStore:
    """The service of the gRPC server, which names no socket address: the test decides when the channel gets one."""
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
    """Gives the channel a socket address and waits until its attempt to dial has ended."""
    channel.dial_if_named(metadata)
    assert channel._dialling is not None
    await asyncio.wait([channel._dialling])


async def dial_server(channel: RoutedChannel, lean: SocketServer) -> Metadata:
    addresses = address_metadata(*await lean.start("127.0.0.1"))
    await dial(channel, addresses)
    assert channel.connection_for(LEASE_PATH) is not None
    return addresses


async def test_calls_in_flight_fail_with_socket_server_and_later_ones_use_grpc(
    channel: RoutedChannel, lean: SocketServer, store: ScriptedStore, over_grpc: ScriptedStore
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


async def test_live_connection_is_kept_whatever_addresses_replies_name(
    channel: RoutedChannel, lean: SocketServer, store: ScriptedStore
) -> None:
    await dial_server(channel, lean)
    connection, pending = channel.connection_for(LEASE_PATH), call(channel, "Lease", LEASE)
    await store.begun.get()
    channel._dial_again_at = 0.0
    channel.dial_if_named(NOBODY)
    assert channel._dialling is None
    store.go.set()
    await pending
    assert channel.connection_for(LEASE_PATH) is connection


async def test_dial_after_a_loss_does_not_affect_grpc_calls(
    channel: RoutedChannel, lean: SocketServer, store: ScriptedStore, over_grpc: ScriptedStore
) -> None:
    """The old connection is released, and a call sent over gRPC meanwhile ends with its own reply."""
    await dial_server(channel, lean)
    await lean.stop(0)
    over = SocketServer(TOKEN)
    over.add("KvStore", store)
    pending = call(channel, "Lease", LEASE)
    await over_grpc.begun.get()
    channel._dial_again_at = 0.0
    await dial_server(channel, over)
    over_grpc.go.set()
    await pending
    await call(channel, "Exists", EXISTS)
    await over.stop(0)


async def test_failed_dials_keep_grpc_and_are_logged_once(
    channel: RoutedChannel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport_selection, "RETRY_S", 0.0)
    caplog.set_level(logging.INFO, logger=transport_selection.log.name)
    for _ in range(3):
        await dial(channel, NOBODY)
        assert (await call(channel, "Exists", EXISTS)).present
    assert caplog.text.count("calls continue over gRPC") == 1


async def test_failed_address_is_not_dialled_again_at_once(channel: RoutedChannel) -> None:
    await dial(channel, NOBODY)
    channel.dial_if_named(NOBODY)
    assert channel._dialling is None


@pytest.mark.parametrize("text", ["", "host lean+unix://name", "here lean+unix://n lean://h:1 x"])
async def test_metadata_without_a_valid_address_are_ignored(channel: RoutedChannel, text: str) -> None:
    channel.dial_if_named([(LEAN_HEADER, text), ("another", "a b c"), (f"{LEAN_HEADER}-bin", b"a b c")])
    assert channel._dialling is None


async def test_close_during_a_dial_ends_dial_and_connection(
    channel: RoutedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_selection, "DIAL_S", NEVER_S)
    async with Silent() as silent, asyncio.timeout(PATIENCE_S):
        channel.dial_if_named([(LEAN_HEADER, f"elsewhere lean+unix://nobody {silent.address}")])
        await silent.met.wait()
        await channel.close()
        await silent.ended.wait()
    assert channel._dialling is None


async def test_close_ends_socket_calls_and_prevents_later_calls_and_dials(
    channel: RoutedChannel, lean: SocketServer, store: ScriptedStore
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
    channel.dial_if_named(addresses)
    assert channel._dialling is None
