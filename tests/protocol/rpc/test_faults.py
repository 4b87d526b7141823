"""Tests of peers that die, stop, lie or stay silent: every call ends, and the server keeps serving and handing over."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import uvloop

from moonserve.protocol.errors import DeadlineExceeded, Incompatible, InvalidRequest, Overloaded, PeerLost
from moonserve.protocol.pb import common_pb2, kvstore_pb2
from moonserve.protocol.rpc import frames, socket_server, socket_server_connection
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.handshake import NONCE_BYTES, Responder
from moonserve.protocol.rpc.socket_client_sync import SyncChannel
from tests.patience import NEVER_S, PATIENCE_S
from tests.protocol.rpc import scripted
from tests.stopping import stop

# Replies of 1 MiB each: more than the sockets' buffers hold.
NUM_UNREAD = 32


@pytest.fixture(params=["tcp", "unix"])
def where(peer: scripted.ServerProcess, request: pytest.FixtureRequest) -> str:
    given: str = getattr(peer, request.param)
    return given


@pytest.fixture
async def stub(where: str, channels: Channels) -> Any:
    return scripted.stub_of(channels.to(where))


def test_uvloop_client_is_answered(where: str) -> None:
    """Clients under uvloop are served, as gateways are."""
    assert uvloop.run(still_serves(where))


async def test_killed_peer_raises_peer_lost_at_once(peer: scripted.ServerProcess, stub: Any) -> None:
    """Calls in flight and later ones end with PeerLost, from asyncio and from threads."""
    with SyncChannel(peer.tcp, scripted.TOKEN) as channel:
        threads = scripted.stub_of(channel)
        threads.Exists(scripted.EXISTS, timeout=PATIENCE_S)
        await stub.Exists(scripted.EXISTS, timeout=PATIENCE_S)
        calls = [asyncio.create_task(stub.Lease(scripted.LEASE, timeout=NEVER_S)) for _ in range(5)]
        calls.append(asyncio.create_task(asyncio.to_thread(threads.Lease, scripted.LEASE, timeout=NEVER_S)))
        await stub.Exists(scripted.EXISTS, timeout=PATIENCE_S)  # the peer has read the other calls before this one
        os.kill(peer.process.pid, signal.SIGKILL)
        for error in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE_S):
            assert isinstance(error, PeerLost)
        with pytest.raises(PeerLost):
            await stub.Exists(scripted.EXISTS, timeout=NEVER_S)
        with pytest.raises(PeerLost):
            threads.Exists(scripted.EXISTS, timeout=NEVER_S)


async def test_waiting_calls_are_cancelled_and_timed_out_on_any_loop(peer: scripted.ServerProcess, stub: Any) -> None:
    cancelled = asyncio.create_task(stub.Lease(scripted.LEASE, timeout=NEVER_S))
    with pytest.raises(DeadlineExceeded):
        await stub.Lease(scripted.LEASE, timeout=0.02)
    cancelled.cancel()
    assert (await stub.Exists(scripted.EXISTS, timeout=PATIENCE_S)).present


async def test_stopped_peer_raises_deadline_exceeded_and_serves_later(peer: scripted.ServerProcess, stub: Any) -> None:
    with SyncChannel(peer.tcp, scripted.TOKEN) as threads:
        await stub.Exists(scripted.EXISTS, timeout=PATIENCE_S)
        threads.call(scripted.EXISTS_PATH, b"", timeout_s=PATIENCE_S)
        stop(peer.process.pid)
        with pytest.raises(DeadlineExceeded):
            await stub.Exists(scripted.EXISTS, timeout=0.05)
        for _ in range(2):  # on an open connection, and on a new one
            with pytest.raises(DeadlineExceeded):
                await asyncio.to_thread(threads.call, scripted.EXISTS_PATH, b"", timeout_s=0.05)
        os.kill(peer.process.pid, signal.SIGCONT)
        assert (await stub.Exists(scripted.EXISTS, timeout=PATIENCE_S)).present
        threads.call(scripted.EXISTS_PATH, b"", timeout_s=PATIENCE_S)


async def test_dial_of_stopped_peer_raises_deadline_exceeded(peer: scripted.ServerProcess, stub: Any) -> None:
    stop(peer.process.pid)
    with pytest.raises(DeadlineExceeded):
        await stub.Exists(scripted.EXISTS, timeout=0.05)


async def still_serves(address: str) -> bool:
    async with Channels(scripted.TOKEN) as channels:
        stub = scripted.stub_of(channels.to(address))
        reply = await channels.call(stub.Exists, scripted.EXISTS, timeout_s=PATIENCE_S)
    return list(reply.present) == [True]


async def test_garbage_instead_of_a_handshake_ends_the_connection(address: str) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(1000), secrets.token_bytes(100_000)):
        client = await scripted.Raw.dial(address)
        client.writer.write(garbage)
        assert await client.ended()
    assert await still_serves(address)


IMPOSSIBLE = struct.pack("<I", 0xFFFF_FFFF)
UNKNOWN_METHOD = frames.request(1, 999, 1.0, b"")


@pytest.mark.parametrize("violation", [IMPOSSIBLE, UNKNOWN_METHOD], ids=["oversize", "method"])
async def test_protocol_violation_ends_the_connection(address: str, violation: bytes) -> None:
    client = await scripted.Raw.dial(address)
    await client.prove()
    client.writer.write(violation)
    assert await client.ended()
    assert await still_serves(address)


async def test_malformed_message_is_an_invalid_request(address: str) -> None:
    with SyncChannel(address, scripted.TOKEN) as channel, pytest.raises(InvalidRequest, match="malformed"):
        await asyncio.to_thread(channel.call, scripted.EXISTS_PATH, b"\xff\xff", timeout_s=PATIENCE_S)


@pytest.mark.parametrize("is_duplicate", [False, True])
async def test_cancellation_or_duplicate_in_the_packet_of_its_request_ends_the_call(
    address: str, store: scripted.ScriptedStore, is_duplicate: bool
) -> None:
    """A second call with the same id ends the connection too."""
    client = await scripted.Raw.dial(address)
    method = (await client.prove()).index(scripted.LEASE_PATH)
    lease = frames.request(1, method, NEVER_S, scripted.LEASE.SerializeToString())
    client.writer.write(lease + (lease if is_duplicate else frames.cancel(1) + frames.cancel(7)))
    assert not is_duplicate or await client.ended()
    assert await store.cancelled.get() == "l"
    await client.close()


async def test_silent_client_is_disconnected(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as impatient:
        impatient.setattr(socket_server_connection, "HANDSHAKE_S", 0.05)
        silent, slow = await scripted.Raw.dial(address), await scripted.Raw.dial(address)
        slow.writer.write(b"MOON")
        assert await silent.ended()
        assert await slow.ended()
    assert await still_serves(address)


async def test_too_many_pending_handshakes_end_the_oldest_and_peers_connect(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_server, "MAX_PENDING_HANDSHAKES", 3)
    proven = await scripted.Raw.dial(address)
    await proven.prove()
    clients = [await scripted.Raw.dial(address) for _ in range(4)]
    assert await clients[0].ended()
    assert await still_serves(address)
    assert await clients[1].ended()  # pushed out by the peer that was just served
    proven.writer.write(frames.request(1, 0, 1.0, b""))
    assert await proven.reader.readexactly(frames.REPLY.size)
    for client in (proven, *clients[2:]):
        await client.close()


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def proven(then: Serve) -> Serve:
    """Returns a server callback that completes the handshake and then runs `then`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        responder = Responder(scripted.TOKEN, [scripted.EXISTS_PATH], secrets.token_bytes(NONCE_BYTES))
        while responder.needed:
            writer.write(responder.receive(await reader.readexactly(responder.needed)))
        await then(reader, writer)
        writer.close()

    return serve


async def require_lost(serve: Serve) -> None:
    """Asserts that a call ends with PeerLost before its deadline."""
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as rude:
        port = rude.sockets[0].getsockname()[1]
        async with Channels(scripted.TOKEN) as channels, asyncio.timeout(PATIENCE_S):
            stub = scripted.stub_of(channels.to(f"lean://127.0.0.1:{port}"))
            with pytest.raises(PeerLost):
                await channels.call(stub.Exists, scripted.EXISTS, timeout_s=NEVER_S)


@pytest.mark.parametrize("behind_its_handshake", [False, True])
async def test_peer_that_closes_silently_raises_peer_lost(behind_its_handshake: bool) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    await require_lost(proven(hang_up) if behind_its_handshake else hang_up)


NO_FAILURE = b"\xff\xff"
STRANGE_FAILURE = common_pb2.Failure(code=PeerLost.code, ids={"message": "m", "self": "s"})


@pytest.mark.parametrize("payload", [NO_FAILURE, STRANGE_FAILURE.SerializeToString()], ids=["garbage", "ids"])
async def test_malformed_failure_ends_its_call(payload: bytes) -> None:
    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        header = await reader.readexactly(frames.REQUEST.size)
        _, call_id, _, _ = frames.REQUEST.unpack(header)
        writer.write(frames.reply(call_id, frames.Status.FAILURE, payload))
        await reader.read()

    await require_lost(proven(fail))


async def test_server_does_not_read_from_client_that_does_not_read(address: str, store: scripted.ScriptedStore) -> None:
    """Replies to a client that reads nothing do not pile up in the server's memory, and all arrive later."""
    store.commit_reply = kvstore_pb2.StoreCommitReply(corrupt=[bytes(1 << 20)])
    client = await scripted.Raw.dial(address)
    method = (await client.prove()).index("/moonserve.KvStore/Commit")
    transport = cast(asyncio.ReadTransport, client.writer.transport)
    transport.pause_reading()
    for call_id in range(NUM_UNREAD):
        client.writer.write(frames.request(call_id, method, 30.0, b""))
        assert await still_serves(address)
    assert store.num_commits < NUM_UNREAD
    transport.resume_reading()
    for call_id in range(NUM_UNREAD):
        header = await client.reader.readexactly(frames.REPLY.size)
        length, replied_id, status = frames.REPLY.unpack(header)
        assert (replied_id, status) == (call_id, frames.Status.OK)
        await client.reader.readexactly(length + frames.LENGTH.size - frames.REPLY.size)
    await client.close()


def exists(channel: SyncChannel) -> bool:
    return list(scripted.stub_of(channel).Exists(scripted.EXISTS, timeout=PATIENCE_S).present) == [True]


def test_bytes_after_takeover_go_to_the_new_owner(where: str) -> None:
    """Bytes after a handover go to the new owner. The channel's other connections are unchanged, also after its end."""
    with SyncChannel(where, scripted.TOKEN) as channel:
        assert exists(channel)
        with channel.take_over(scripted.ECHO, timeout_s=PATIENCE_S) as first:
            first.settimeout(PATIENCE_S)
            for said in (b"one", b"two"):
                first.sendall(said)
                assert first.recv(100) == said.upper()
            with channel.take_over(scripted.ECHO, timeout_s=PATIENCE_S) as second:
                second.settimeout(PATIENCE_S)
                second.sendall(b"beside")
                assert second.recv(100) == b"BESIDE"
            assert exists(channel)
            first.shutdown(socket.SHUT_WR)
            assert first.recv(100) == b""
        assert exists(channel)


def test_refused_takeover_gives_the_reason(where: str) -> None:
    with SyncChannel(where, scripted.TOKEN) as channel:
        with pytest.raises(Overloaded, match="no place"):
            channel.take_over(scripted.FULL, timeout_s=PATIENCE_S)
        with pytest.raises(Incompatible, match="no method"):
            channel.take_over("/test!none", timeout_s=PATIENCE_S)
        assert exists(channel)


async def test_bytes_after_the_takeover_request_end_the_connection(where: str) -> None:
    """Bytes sent before the reply to a handover would reach the old protocol, so they end the connection."""
    client = await scripted.Raw.dial(where)
    methods = await client.prove()
    client.writer.write(frames.request(1, methods.index(scripted.ECHO), 10.0, b"") + b"early")
    with contextlib.suppress(ConnectionResetError):
        assert await client.reader.read(100) == b""
    await client.close()
    assert await still_serves(where)
