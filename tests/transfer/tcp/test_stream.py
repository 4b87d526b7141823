"""The initiator's end of a stream: time is kept however the answers come, and what they say is checked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from protocol.errors import PeerLost
from tests.patience import PATIENCE_S
from tests.transfer.conftest import TOKEN
from tests.transfer.impostor import answering
from transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from transfer.tcp.connection import Connection
from transfer.tcp.frames import Code, Header, Kind, encode


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

    local = engine.allocate(64)
    with answering(late) as impostor:
        read = Transfer(Op.READ, local, 0, RemoteSegment(impostor.address, 1), 0, 64)
        engine.submit([read], deadline_s=PATIENCE_S).wait(PATIENCE_S)
        batches = [engine.submit([read], deadline_s=0.5) for _ in range(200)]
        for batch in batches:
            with suppress(PeerLost):
                batch.wait(PATIENCE_S)
        # All answers together take two seconds, which would be waited for.
        assert any(isinstance(batch.errors[0], PeerLost) for batch in batches)
        engine.forget(impostor.address)


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
def test_a_list_of_segments_that_is_none_loses_the_peer(engine: TransferEngine, text: bytes) -> None:
    def answer(connection: Connection, header: Header) -> None:
        connection.send(encode(Header(kind=Kind.REPLY, entries=len(text))) + text)

    with answering(answer) as impostor, pytest.raises(PeerLost):
        engine.open(impostor.address, deadline_s=PATIENCE_S)


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

    with answering(answer) as impostor:
        to, remote = engine.allocate(64), RemoteSegment(impostor.address, 1)
        with pytest.raises(PeerLost):
            engine.run([Transfer(Op.READ, to, 0, remote, 0, 64)], deadline_s=PATIENCE_S)
