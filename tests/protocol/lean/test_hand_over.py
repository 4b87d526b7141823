"""Connections that are handed over to another protocol, by a server of another process under both event loops."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.errors import Incompatible, Overloaded
from protocol.lean import frames, sockets
from protocol.lean.handshake import NONCE_BYTES, Initiator
from protocol.lean.sync_channel import SyncChannel
from protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from tests.patience import PATIENCE_S
from tests.protocol.lean.scripted import ECHO, FULL, HERE, TOKEN, ServerProcess, server_process

EXISTS = kvstore_pb2.StoreExistsRequest(keys=[HERE])


@pytest.fixture(params=["asyncio", "uvloop"])
def peer(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with server_process(request.param) as peer:
        yield peer


@pytest.fixture(params=["tcp", "unix"])
def address(peer: ServerProcess, request: pytest.FixtureRequest) -> str:
    given: str = getattr(peer, request.param)
    return given


def exists(channel: SyncChannel) -> bool:
    stub: Any = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[call-overload]
    return list(stub.Exists(EXISTS, timeout=PATIENCE_S).present) == [True]


def test_what_follows_goes_to_whoever_took_the_connection(address: str) -> None:
    """The channel's other connections stay what they are, also when the handed one ends."""
    with SyncChannel(address, TOKEN) as channel:
        assert exists(channel)
        with channel.hand_over(ECHO, timeout_s=PATIENCE_S) as first:
            first.settimeout(PATIENCE_S)
            for said in (b"one", b"two"):
                first.sendall(said)
                assert first.recv(100) == said.upper()
            with channel.hand_over(ECHO, timeout_s=PATIENCE_S) as second:
                second.settimeout(PATIENCE_S)
                second.sendall(b"beside")
                assert second.recv(100) == b"BESIDE"
            assert exists(channel)
            first.shutdown(socket.SHUT_WR)
            assert first.recv(100) == b""
        assert exists(channel)


def test_whom_nobody_takes_is_told_why(address: str) -> None:
    with SyncChannel(address, TOKEN) as channel:
        with pytest.raises(Overloaded, match="no place"):
            channel.hand_over(FULL, timeout_s=PATIENCE_S)
        with pytest.raises(Incompatible, match="no method"):
            channel.hand_over("/test!none", timeout_s=PATIENCE_S)
        assert exists(channel)


def test_bytes_behind_the_question_end_the_connection(address: str) -> None:
    """They would have reached the old protocol: nobody could tell whose they are."""
    with proven(address) as (sock, methods):
        question = frames.request(1, methods.index(ECHO), 10.0, b"")
        sock.sendall(question + b"early")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    with SyncChannel(address, TOKEN) as channel:
        assert exists(channel)


@contextlib.contextmanager
def proven(address: str) -> Iterator[tuple[socket.socket, tuple[str, ...]]]:
    """A connection behind its handshake, and what the server offers."""
    family, target = sockets.parse(address)
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(target)
        initiator = Initiator(TOKEN, secrets.token_bytes(NONCE_BYTES))
        sock.sendall(initiator.hello)
        while initiator.needed:
            message = b""
            while len(message) < initiator.needed:
                message += sock.recv(initiator.needed - len(message))
            sock.sendall(initiator.receive(message))
        yield sock, initiator.methods
