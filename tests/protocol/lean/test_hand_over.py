"""Connections that are handed over to another protocol, by a server of another process under both event loops."""

from __future__ import annotations

import contextlib
import socket

import pytest

from protocol.errors import Incompatible, Overloaded
from protocol.lean import frames
from protocol.lean.sync_channel import SyncChannel
from tests.patience import PATIENCE_S
from tests.protocol.lean.scripted import ECHO, EXISTS, FULL, TOKEN, Raw, ServerProcess, stub_of


@pytest.fixture(params=["tcp", "unix"])
def address(peer: ServerProcess, request: pytest.FixtureRequest) -> str:
    given: str = getattr(peer, request.param)
    return given


def exists(channel: SyncChannel) -> bool:
    return list(stub_of(channel).Exists(EXISTS, timeout=PATIENCE_S).present) == [True]


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


async def test_bytes_behind_the_question_end_the_connection(address: str) -> None:
    """They would have reached the old protocol: nobody could tell whose they are."""
    client = await Raw.dial(address)
    methods = await client.prove()
    client.writer.write(frames.request(1, methods.index(ECHO), 10.0, b"") + b"early")
    with contextlib.suppress(ConnectionResetError):
        assert await client.reader.read(100) == b""
    await client.close()
    with SyncChannel(address, TOKEN) as channel:
        assert exists(channel)
