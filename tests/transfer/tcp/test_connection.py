"""Stream connections: sent buffers are released, every wait ends, and answers are checked before they are used."""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from xxhash import xxh3_64_digest

from moonserve.protocol.errors import PeerLost
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import address_of, vectors
from moonserve.transfer.memory.scatter import REMOTE
from moonserve.transfer.memory.segments import SegmentTable
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.tcp.exchange import TcpTarget
from moonserve.transfer.tcp.frames import Code, Header, Kind, encode
from moonserve.transfer.tcp.target import StreamTarget
from tests.patience import PATIENCE_S
from tests.transfer.conftest import MakePair, Pair

TRANSPORTS = ["tcp"]


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_sent_buffers_are_released_although_the_queue_is_never_empty(
    ends: tuple[Connection, socket.socket], sealed: bool
) -> None:
    connection, theirs = ends
    connection.seals = sealed
    theirs.setblocking(False)
    segment = SegmentTable().add(memoryview(bytearray(random.Random(1).randbytes(1 << 20))), readable=True)
    payload, places = segment.buffer, range((1 << 20) - 1024, -1, -1024)
    rows = scatter.rows(*((at, 0, 1024) for at in places))
    frame = b"header" + b"".join(payload[at : at + 1024] for at in places)
    frame += xxh3_64_digest(frame[6:])[::-1] if sealed else b""
    received = bytearray()
    for sent in range(51):
        connection.queue_payload(b"header", segment, rows, REMOTE, len(payload))
        while len(received) < sent * len(frame):  # the receiver stays one frame behind
            connection._pump(0)
            with contextlib.suppress(BlockingIOError):
                received += theirs.recv(1 << 16)
        assert not connection.flow.out.empty
        assert len(connection._owners) <= 4
    assert received.startswith(frame * 50)


@pytest.mark.parametrize(
    ("round_trip_s", "streams", "expected"), [(None, None, 1), (1.9e-3, None, 1), (2e-3, None, 4), (0.1, 2, 2)]
)
def test_connections_follow_the_round_trip_unless_their_number_is_given(
    monkeypatch: pytest.MonkeyPatch, make_pair: MakePair, round_trip_s: float | None, streams: int | None, expected: int
) -> None:
    monkeypatch.setattr(Connection, "round_trip_s", lambda _: round_trip_s)
    pair = make_pair(streams=streams, slice_bytes=1 << 16)
    assert pair.near.open(pair.far.address)
    pair.run(pair.read(0, 0, 1 << 20))
    assert pair.near.usage().num_endpoints == expected


def test_push_sends_without_a_wait(ends: tuple[Connection, socket.socket]) -> None:
    connection, theirs = ends
    connection.queue(b"header")
    connection.push()
    assert theirs.recv(16, socket.MSG_DONTWAIT) == b"header"


def test_a_push_to_a_closed_connection_fails_in_the_next_wait(ends: tuple[Connection, socket.socket]) -> None:
    connection, theirs = ends
    theirs.close()
    connection.queue(b"header")
    connection.push()
    with pytest.raises(PeerLost):
        connection.receive_bytes(1)


def test_a_trickling_sender_does_not_extend_the_deadline(ends: tuple[Connection, socket.socket]) -> None:
    connection, theirs = ends
    into = bytearray(1 << 20)
    done = threading.Event()

    def trickle() -> None:
        while not done.wait(0.005):
            theirs.send(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    connection.set_deadline(time.monotonic() + 0.2)
    try:
        with pytest.raises(PeerLost, match="in time"):
            connection.receive_guarded(vectors((address_of(into), len(into))), contextlib.nullcontext())
    finally:
        done.set()
        sender.join()


def test_aborting_wakes_a_wait_without_a_deadline(ends: tuple[Connection, socket.socket]) -> None:
    connection, _ = ends
    timer = threading.Timer(0.05, connection.abort)
    timer.start()
    with pytest.raises(PeerLost):
        connection.receive_bytes(1)
    timer.join()


@pytest.fixture
def bare(make_pair: MakePair) -> Pair:
    return make_pair(64, checksums=False)


def answer_with(monkeypatch: pytest.MonkeyPatch, frame: bytes, pause_s: float = 0.0) -> None:
    """Makes targets reply with `frame` to every request."""

    def dispatch(target: StreamTarget, header: Header) -> None:
        target.connection.discard(header.entries * 24)
        threading.Event().wait(pause_s)
        target.connection.send(frame)

    monkeypatch.setattr(StreamTarget, "dispatch", dispatch)
    monkeypatch.setattr(TcpTarget, "_keep", lambda *_: False)


def test_many_short_waits_do_not_outlast_the_deadline(bare: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is checked even if every single reply arrives too soon for a check during its wait."""
    answer_with(monkeypatch, encode(Header(kind=Kind.REPLY, nbytes=64)) + bytes(64), pause_s=0.01)
    read = bare.read(0, 0, 64)
    bare.run(read)
    batches = [bare.near.submit([read], deadline_s=0.5) for _ in range(200)]
    for batch in batches:
        with contextlib.suppress(PeerLost):
            batch.wait(PATIENCE_S)
    # All replies together take two seconds.
    assert any(isinstance(batch.errors[0], PeerLost) for batch in batches)


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
def test_an_unreadable_list_of_segments_is_lost_peer(bare: Pair, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    answer_with(monkeypatch, encode(Header(kind=Kind.REPLY, entries=len(text))) + text)
    with pytest.raises(PeerLost):
        bare.near.open(bare.far.address, deadline_s=PATIENCE_S)


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
def test_an_invalid_reply_is_a_lost_peer(bare: Pair, monkeypatch: pytest.MonkeyPatch, reply: Header) -> None:
    answer_with(monkeypatch, encode(reply) + bytes(64))
    with pytest.raises(PeerLost):
        bare.near.run([bare.read(0, 0, 64)], deadline_s=PATIENCE_S)
