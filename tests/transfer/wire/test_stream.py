"""The initiator's end of a stream: time is kept however the answers come, and what they say is checked."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from protocol.errors import MoonserveError, PeerLost
from tests.patience import PATIENCE_S
from tests.transfer.conftest import TOKEN
from transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from transfer.address import Address, Rail, host_identity
from transfer.base import Credentials
from transfer.wire import handshake
from transfer.wire.connection import Connection
from transfer.wire.frames import HEADER_BYTES, Code, Header, Kind, decode, encode

INSTANCE = bytes(range(16))
Answer = Callable[[Connection, Header], None]


class Impostor:
    """A target that knows the token; what it answers is the test's affair."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.address = str(
            Address(INSTANCE, host_identity(), {"tcp": (Rail("tcp", "lo", endpoint),)})
        )
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            connection = Connection(sock)
            connection.set_deadline(time.monotonic() + PATIENCE_S)
            with suppress(MoonserveError):
                handshake.respond(
                    connection, Credentials(TOKEN.encode(), INSTANCE), 7, checksums=False
                )
                while True:
                    header = decode(connection.receive_bytes(HEADER_BYTES))
                    connection.discard(header.entries * 24)
                    self._answer(connection, header)
            connection.close()


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    options = TransferOptions(transports=("tcp",), checksums=False)
    with TransferEngine(cluster_token=TOKEN, options=options) as made:
        yield made


def test_many_short_waits_do_not_outlast_the_deadline(engine: TransferEngine) -> None:
    """No single answer takes long enough to look at the clock while waiting for it."""

    def late(connection: Connection, header: Header) -> None:
        threading.Event().wait(0.01)
        connection.send(encode(Header(kind=Kind.REPLY, nbytes=64)) + bytes(64))

    impostor = Impostor(late)
    local = engine.allocate(64)
    read = Transfer(Op.READ, local, 0, RemoteSegment(impostor.address, 1), 0, 64)
    engine.submit([read], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    batches = [engine.submit([read], deadline_s=0.5) for _ in range(200)]
    for batch in batches:
        with suppress(PeerLost):
            batch.wait(PATIENCE_S)
    # All answers together take two seconds, which would be waited for.
    assert any(isinstance(batch.errors[0], PeerLost) for batch in batches)
    engine.forget(impostor.address)
    impostor.close()


@pytest.mark.parametrize(
    "text",
    [
        b"nonsense",
        b"[" * 100_000,
        b"[1]",
        b'{"segment_id": 1}',
        b'[{"segment_id": "1", "nbytes": 1, "location": "", "readable": true, "name": ""}]',
        b'[{"segment_id": -1, "nbytes": 1, "location": "", "readable": true, "name": ""}]',
        b'[{"segment_id": 1, "nbytes": 1}]',
    ],
    ids=lambda text: text[:30].decode(),
)
def test_a_list_of_segments_that_is_none_loses_the_peer(
    engine: TransferEngine, text: bytes
) -> None:
    def answer(connection: Connection, header: Header) -> None:
        connection.send(encode(Header(kind=Kind.REPLY, entries=len(text))) + text)

    impostor = Impostor(answer)
    with pytest.raises(PeerLost):
        engine.open(impostor.address, deadline_s=PATIENCE_S)
    impostor.close()


@pytest.mark.parametrize(
    "reply",
    [
        Header(kind=Kind.REPLY, nbytes=63),
        Header(kind=Kind.REPLY, nbytes=1 << 40),
        Header(kind=Kind.REPLY, entries=5, nbytes=64),
        Header(kind=Kind.READ),
        Header(kind=Kind.REPLY, code=Code.STALE),
    ],
    ids=["too little", "too much", "with text", "a request", "a refusal without words"],
)
def test_an_answer_that_cannot_be_one_loses_the_peer(engine: TransferEngine, reply: Header) -> None:
    def answer(connection: Connection, header: Header) -> None:
        connection.send(encode(reply) + bytes(64))

    impostor = Impostor(answer)
    local = engine.allocate(64)
    read = Transfer(Op.READ, local, 0, RemoteSegment(impostor.address, 1), 0, 64)
    with pytest.raises(PeerLost):
        engine.submit([read], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    impostor.close()
