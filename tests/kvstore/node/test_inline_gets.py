"""Gets over an inline connection from an index in this process, and checksums of values that arrive in pieces."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonserve.kvstore.client.node_access import inline_protocol
from moonserve.kvstore.index_layout import LocateStatus
from moonserve.kvstore.node.inline_puts import InlinePuts
from moonserve.kvstore.node.inline_server import MAX_KEYS_PER_GET, InlineServer
from moonserve.protocol.errors import DeadlineExceeded, PeerLost
from moonserve.protocol.kv_blocks import checksum
from moonserve.transfer import TransferEngine
from moonserve.transfer.memory.data_plane import address_of, vectors
from tests.kvstore.client.published import Published
from tests.kvstore.node.nodes import key
from tests.thoroughness import examples

NUM_VALUES = 20
MOST_PIECES = 500  # single bytes only for short data
SIZES = st.integers(0, 5_000) | st.just(131_072) | st.integers(130_000, 400_000)
ANYTHING = settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
Row = tuple[int, LocateStatus, bytes]
"""Length, standing, and the bytes sent with the row."""


@pytest.fixture(scope="module")
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(cluster_token="gets") as engine:
        yield engine


@pytest.fixture
def published(engine: TransferEngine) -> Published:
    """Publishes values 0 to 19, of which every fifth is empty."""
    published = Published(engine, engine.allocate(4 << 20))
    for number in range(NUM_VALUES):
        published.put(number, value(number))
    return published


def value(number: int) -> bytes:
    return bytes([number]) * (number % 5 * 3000)


class Serving:
    """A connection that a thread serves; `ends_with` returns the error that ended it."""

    def __init__(self, published: Published) -> None:
        self.sock, theirs = socket.socketpair()
        self._served = InlineServer(published.index, published.data, cast(InlinePuts, None))
        self._ended: list[Exception] = []
        self._thread = threading.Thread(target=self._run, args=(inline_protocol.InlineConnection(theirs),))
        self._thread.start()

    def _run(self, link: inline_protocol.InlineConnection) -> None:
        try:
            self._served.serve(link)
        except Exception as error:
            self._ended.append(error)
        finally:
            link.close()

    def ends_with(self) -> Exception:
        self._thread.join()
        self.sock.close()
        [error] = self._ended
        return error

    def ask(self, question: bytes, cuts: Sequence[int] = ()) -> None:
        places = [0, *sorted(cut % len(question) for cut in cuts), len(question)]
        for begin, end in itertools.pairwise(places):
            self.sock.sendall(question[begin:end])

    def answer(self, count: int) -> list[Row]:
        status, told, nbytes = inline_protocol.RESPONSE.unpack(self._receive(inline_protocol.RESPONSE.size))
        assert (status, told, nbytes) == (inline_protocol.ResponseStatus.OK, count, count * inline_protocol.ROW_BYTES)
        rows = np.frombuffer(self._receive(nbytes), np.uint64).reshape(count, 4).tolist()
        found = []
        for _, extent, _, _ in rows:
            standing, length = inline_protocol.status_and_length(extent)
            sent = self._receive(length) if standing == LocateStatus.SENT else b""
            found.append((length, LocateStatus(standing), sent))
        return found

    def _receive(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            some = self.sock.recv(nbytes - len(data))
            assert some, "it has ended"
            data += some
        return data


@contextlib.contextmanager
def served(published: Published) -> Iterator[Serving]:
    serving = Serving(published)
    try:
        yield serving
    finally:
        serving.sock.close()
        serving.ends_with()


def get(numbers: Sequence[int], rooms: Sequence[int], budget: int = 2**20, deadline_ms: int = 30_000) -> bytes:
    head = inline_protocol.pack_request(inline_protocol.RequestKind.GET, len(numbers), deadline_ms, budget)
    return head + b"".join(map(key, numbers)) + np.array(rooms, np.uint64).tobytes()


def expected(numbers: Sequence[int], rooms: Sequence[int], budget: int) -> list[Row]:
    rows: list[Row] = []
    for number, room in zip(numbers, rooms, strict=True):
        if number >= NUM_VALUES:
            rows.append((0, LocateStatus.MISSING, b""))
        elif len(value(number)) <= min(room, budget):
            rows.append((len(value(number)), LocateStatus.SENT, value(number)))
            budget -= len(value(number))
        else:
            rows.append((len(value(number)), LocateStatus.IN_MEMORY, b""))
    return rows


wanted = st.lists(
    st.tuples(st.integers(0, NUM_VALUES + 5), st.sampled_from([0, 2999, 6000, inline_protocol.UNLIMITED])), max_size=40
)


@ANYTHING
@given(
    asked=st.lists(st.tuples(wanted, st.sampled_from([0, 10_000, 2**20])), max_size=5),
    cuts=st.lists(st.integers(0, 2**16), max_size=6),
)
def test_every_get_is_answered_like_the_index_for_any_split_of_its_bytes(
    published: Published, asked: list[tuple[list[tuple[int, int]], int]], cuts: list[int]
) -> None:
    with served(published) as serving:
        for wishes, budget in asked:
            numbers, rooms = [number for number, _ in wishes], [room for _, room in wishes]
            serving.ask(get(numbers, rooms, budget), cuts)
            assert serving.answer(len(numbers)) == expected(numbers, rooms, budget)


@pytest.mark.parametrize("extra", [0, 1])
def test_a_get_of_too_many_keys_ends_the_connection(published: Published, extra: int) -> None:
    numbers = [number % (NUM_VALUES + 1) for number in range(MAX_KEYS_PER_GET + extra)]
    rooms = [0] * len(numbers)
    serving = Serving(published)
    serving.ask(get(numbers, rooms))
    if extra:
        assert isinstance(serving.ends_with(), inline_protocol.MalformedRequest)
    else:
        assert serving.answer(len(numbers)) == expected(numbers, rooms, 0)
        serving.sock.shutdown(socket.SHUT_WR)
        serving.ends_with()


@pytest.mark.parametrize("part", [0, 10, 24, 40, 1000])
def test_a_peer_that_hangs_up_during_a_request_ends_it(published: Published, part: int) -> None:
    serving = Serving(published)
    serving.ask(get([1, 2], [0, 0])[:part] or b"\1")
    serving.sock.shutdown(socket.SHUT_WR)
    if part == 1000:
        serving.answer(2)
    assert isinstance(serving.ends_with(), PeerLost)


def test_a_peer_that_does_not_read_its_response_is_cut_off_at_the_deadline(published: Published) -> None:
    published.put(500, bytes(2 << 20))
    serving = Serving(published)
    serving.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    numbers = [500] * 8  # several times the socket buffers
    serving.ask(get(numbers, [inline_protocol.UNLIMITED] * 8, inline_protocol.MAX_BYTES, deadline_ms=50))
    assert isinstance(serving.ends_with(), DeadlineExceeded)


def checksums_on_arrival(
    link: inline_protocol.InlineConnection, values: list[memoryview], lengths: list[int], s: float
) -> list[int]:
    steps = inline_protocol.hash_on_arrival(link, np.array(lengths, np.uint64), lambda place: checksum([values[place]]))
    return inline_protocol.run_steps(steps, link, time.monotonic() + s)


def landed(memory: bytearray, lengths: list[int], link: inline_protocol.InlineConnection) -> list[memoryview]:
    """Starts receiving into `memory`, in pieces of any size, and returns the values' places, which lie back to back."""
    cuts = [0, *sorted({min(sum(lengths), 7 + 31 * n * n) for n in range(100)}), sum(lengths)]
    link.receive(vectors(*((address_of(memory) + at, end - at) for at, end in itertools.pairwise(cuts))), 0)
    ends = np.cumsum(lengths).tolist()
    view = memoryview(memory)
    return [view[end - n : end] for end, n in zip(ends, lengths, strict=True)]


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(SIZES, max_size=8), st.integers(1, 300_000))
def test_each_value_has_its_own_checksum_for_any_split(lengths: list[int], piece: int) -> None:
    data = np.random.default_rng(piece).bytes(sum(lengths))
    piece = max(piece, len(data) // MOST_PIECES)
    near, far = socket.socketpair()

    def dribble() -> None:
        for at in range(0, len(data), piece):
            far.sendall(data[at : at + piece])

    sender = threading.Thread(target=dribble)
    link = inline_protocol.InlineConnection(near)
    sender.start()
    try:
        memory = bytearray(max(1, len(data)))
        places = landed(memory, lengths, link)
        found = checksums_on_arrival(link, places, lengths, 30.0)
    finally:
        sender.join()
        link.close()
        far.close()
    assert bytes(memory[: len(data)]) == data
    assert found == [checksum([place]) for place in places]


def test_a_peer_that_closes_raises_peer_lost_and_one_that_stops_deadline_exceeded() -> None:
    near, far = socket.socketpair()
    link = inline_protocol.InlineConnection(near)
    far.sendall(b"half")
    places = landed(bytearray(8), [8], link)
    with pytest.raises(DeadlineExceeded):
        checksums_on_arrival(link, places, [8], 0.05)
    far.close()
    with pytest.raises(PeerLost):
        checksums_on_arrival(link, places, [8], 30.0)
    link.close()
