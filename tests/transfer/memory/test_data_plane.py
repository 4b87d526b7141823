"""Native data plane: copies rows, converts them to iovecs, and moves bytes both ways over a stream at once."""

import ctypes
import errno
import gc
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonserve.protocol.errors import ConfigError
from moonserve.transfer.memory.data_plane import Flow, IoVectors, PumpEnd, address_of, data_plane, vectors
from moonserve.transfer.memory.scatter import LENGTH, LOCAL, REMOTE, Rows
from moonserve.transfer.memory.scatter import rows as rows_of
from tests.patience import PATIENCE_S
from tests.thoroughness import examples

plane = data_plane()


def test_missing_compiled_code_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="compiler"):
        data_plane.__wrapped__()


# Rows

SIZE = 4096
lengths = st.lists(st.integers(0, 300), min_size=0, max_size=40)


@st.composite
def disjoint_rows(draw: st.DrawFn) -> Rows:
    """Draws rows whose destinations (LOCAL) do not overlap; their sources may."""
    made, place = [], 0
    for length in draw(lengths):
        place += draw(st.integers(0, 5))
        if place + length > SIZE:
            break
        made.append((draw(st.integers(0, SIZE - length)), place, length))
        place += length
    return rows_of(*made)


@given(rows=disjoint_rows(), flip=st.booleans())
def test_every_row_is_copied_and_nothing_else(rows: Rows, flip: bool) -> None:
    source = np.random.default_rng(0).integers(1, 256, SIZE, np.uint8)
    into, expected = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    for remote, local, length in rows.tolist():
        expected[local : local + length] = source[remote : remote + length]
    column = LOCAL
    if flip:
        rows, column = np.ascontiguousarray(rows[:, [LOCAL, REMOTE, LENGTH]]), REMOTE
    plane.copy_rows(address_of(into), address_of(source), rows, to_column=column)
    assert np.array_equal(into, expected)
    into[:] = 0
    assert plane.copy_rows_verified(address_of(into), address_of(source), rows, to_column=column)
    assert np.array_equal(into, expected)


@given(rows=disjoint_rows(), data=st.data())
def test_one_different_byte_makes_rows_unequal(rows: Rows, data: st.DataObject) -> None:
    source = np.random.default_rng(0).integers(1, 256, SIZE, np.uint8)
    into = np.zeros(SIZE, np.uint8)
    plane.copy_rows(address_of(into), address_of(source), rows, to_column=LOCAL)
    assert plane.rows_equal(address_of(into), address_of(source), rows, column=LOCAL)
    covered = [local + i for _, local, length in rows.tolist() for i in range(length)]
    if covered:
        into[data.draw(st.sampled_from(covered))] = 0  # the source contains no zero
        assert not plane.rows_equal(address_of(into), address_of(source), rows, column=LOCAL)


def test_a_source_that_changes_during_a_copy_is_detected() -> None:
    source, into = np.zeros(8 << 20, np.uint8), np.zeros(8 << 20, np.uint8)
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            source[:] += 1

    changing = threading.Thread(target=change)
    changing.start()
    rows = rows_of((0, 0, len(source)))
    give_up_at = time.monotonic() + PATIENCE_S
    try:
        while plane.copy_rows_verified(address_of(into), address_of(source), rows, to_column=LOCAL):
            assert time.monotonic() < give_up_at
    finally:
        done.set()
        changing.join()


def test_rows_need_neither_be_contiguous_nor_aligned() -> None:
    source, into = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    wide = np.zeros((2, 6), np.int64)
    wide[:, ::2] = rows_of((0, 10, 5), (20, 30, 7))
    plane.copy_rows(address_of(into), address_of(source), wide[:, ::2], to_column=LOCAL)
    frame = b"x" + rows_of((40, 50, 3)).tobytes()
    unaligned = np.frombuffer(frame, "<i8", offset=1).reshape(-1, 3)
    plane.copy_rows(address_of(into), address_of(source), unaligned, to_column=LOCAL)
    assert bytes(into[10:15]) == bytes(range(5))
    assert bytes(into[30:37]) == bytes(range(20, 27))
    assert bytes(into[50:53]) == bytes(range(40, 43))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100), st.integers(0, 9)), max_size=30))
def test_iovecs_are_the_same_bytes_in_the_same_order(triples: list[tuple[int, int, int]]) -> None:
    rows, base = rows_of(*triples), 1 << 40
    for column in (REMOTE, LOCAL):
        made = plane.iovecs(base, rows, column=column).tolist()
        places = [base + row[column] + i for row in triples for i in range(row[LENGTH])]
        assert [start + i for start, length in made for i in range(length)] == places
        assert all(length for _, length in made)
        assert all(start + length != after for (start, length), (after, _) in itertools.pairwise(made))


def test_address_of_accepts_any_contiguous_memory() -> None:
    views = memoryview(b"read-only view")[5:], memoryview(bytearray(b"writable view"))[5:]
    arrays = np.arange(3, dtype=np.int64), np.frombuffer(b"read-only array", np.uint8)
    for memory in (b"bytes", bytearray(b"bytearray"), b"", *views, *arrays):
        content = bytes(memory)
        assert ctypes.string_at(address_of(memory), len(content)) == content


# Streams

SECOND = 1_000_000_000
LONG = int(PATIENCE_S * SECOND)
Sockets = tuple[socket.socket, socket.socket]


def tcp_pair() -> Sockets:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


@pytest.fixture(params=[socket.socketpair, tcp_pair])
def pair(request: pytest.FixtureRequest) -> Iterator[Sockets]:
    near, far = request.param()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        yield near, far


def cut(buffer: bytes | bytearray, lengths: Sequence[int] = ()) -> IoVectors:
    """Splits the whole buffer into pieces of these lengths and one piece with the rest."""
    base, pieces, place = address_of(buffer), [], 0
    for length in lengths:
        length = min(length, len(buffer) - place)
        pieces.append((base + place, length))
        place += length
    return vectors(*pieces, (base + place, len(buffer) - place))


def receiving(nbytes: int, lengths: Sequence[int] = (), at_least: int | None = None) -> tuple[bytearray, Flow]:
    """Returns a buffer and a flow that receives into it. The buffer must live as long as the flow is used."""
    landed, flow = bytearray(nbytes), Flow()
    flow.receive(cut(landed, lengths), at_least)
    return landed, flow


def pump(sock: socket.socket, flow: Flow, timeout_ns: int = LONG, spin_ns: int = 0) -> PumpEnd:
    return plane.pump(sock.fileno(), flow, timeout_ns=timeout_ns, spin_ns=spin_ns)


def test_two_ends_that_both_send_first_do_not_block_each_other(pair: Sockets) -> None:
    size, rng = 6 << 20, random.Random(0)
    sent = [rng.randbytes(size), rng.randbytes(size)]
    received = [bytearray(size), bytearray(size)]

    def run(end: int) -> None:
        flow = Flow()
        flow.out.add(cut(sent[end], [rng.randint(0, 100_000) for _ in range(50)]))
        flow.receive(cut(received[end], [rng.randint(0, 100_000) for _ in range(50)]))
        while not (flow.out.empty and flow.into.empty):
            assert pump(pair[end], flow, SECOND // 10, 20_000) not in (PumpEnd.HANGUP, PumpEnd.ERROR)

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    assert received[0] == sent[1]
    assert received[1] == sent[0]


@settings(max_examples=examples(30))
@example(out=[3] * 5000, into=[7] * 3000, size=30_000)  # more than one system call accepts
@given(
    out=st.lists(st.integers(0, 50), max_size=20),
    into=st.lists(st.integers(0, 50), max_size=20),
    size=st.integers(1, 500),
)
def test_pieces_of_any_length_form_one_stream(out: list[int], into: list[int], size: int) -> None:
    content, landed = random.Random(size).randbytes(size), bytearray(size)
    near, far = socket.socketpair()
    with near, far:
        sender, receiver = Flow(), Flow()
        sender.out.add(cut(content, out))
        receiver.receive(cut(landed, into))
        before = [sender.out.array.copy(), receiver.into.array.copy()]
        assert pump(near, sender) is PumpEnd.OUT_DONE
        assert pump(far, receiver) is PumpEnd.IN_DONE
    assert landed == content
    assert sender.out.moved == receiver.into.moved == size
    # The caller's arrays are unchanged.
    assert np.array_equal(before[0], sender.out.array)
    assert np.array_equal(before[1], receiver.into.array)


def test_a_timeout_keeps_progress_and_the_next_call_continues(pair: Sockets) -> None:
    near, far = pair
    landed, flow = receiving(10, [3, 3])
    far.send(b"01234")
    while flow.into.moved < 5:
        assert pump(near, flow, SECOND // 100) is PumpEnd.TIMEOUT
    assert (flow.into.moved, flow.into.index, flow.into.offset) == (5, 1, 2)
    far.send(b"56789")
    assert pump(near, flow) is PumpEnd.IN_DONE
    assert landed == b"0123456789"


def test_complete_input_ends_the_call_despite_unsent_output(pair: Sockets) -> None:
    near, far = pair
    far.send(b"answer")
    (landed, flow), much = receiving(6), bytes(32 << 20)
    flow.out.add(cut(much))
    assert pump(near, flow) is PumpEnd.IN_DONE
    assert landed == b"answer"
    assert 0 < flow.out.moved < len(much)
    before = flow.out.moved
    while len(far.recv(1 << 20)) == 1 << 20:
        pass
    while flow.out.moved == before:
        assert pump(near, flow, SECOND // 100) is PumpEnd.TIMEOUT


def test_a_hangup_is_reported_after_all_received_bytes(pair: Sockets) -> None:
    near, far = pair
    far.send(b"last words")
    far.close()
    landed, flow = receiving(20)
    assert pump(near, flow) is PumpEnd.HANGUP
    assert landed[: flow.into.moved] == b"last words"


def test_a_broken_pipe_raises_no_signal_and_earlier_input_is_still_read() -> None:
    near, far = socket.socketpair()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        far.send(b"refused")
        far.close()
        landed, flow = receiving(7, [3])
        flow.out.add(cut(b"x" * 100))
        assert pump(near, flow) is PumpEnd.IN_DONE
        assert landed == b"refused"
        assert pump(near, flow) is PumpEnd.HANGUP
    finally:
        signal.signal(signal.SIGPIPE, before)
        near.close()


def test_any_other_failure_is_an_error_number() -> None:
    landed, flow = receiving(1)
    with open(os.devnull) as no_socket:
        assert plane.pump(no_socket.fileno(), flow, timeout_ns=LONG, spin_ns=0) is PumpEnd.ERROR
    assert flow.state.error == errno.ENOTSOCK
    assert landed == b"\0"


def test_a_fruitless_spin_is_not_repeated_immediately(pair: Sockets) -> None:
    near, far = pair
    landed, flow = receiving(2)
    far.send(b"a")
    wait_ns, spent = SECOND // 20, []
    for _ in range(3):
        began = time.thread_time_ns()
        assert pump(near, flow, wait_ns, SECOND) is PumpEnd.TIMEOUT
        spent.append(time.thread_time_ns() - began)
    assert max(spent[1:]) < wait_ns // 2
    assert landed == b"a\0"


def test_a_descriptor_arrives_with_its_bytes() -> None:
    near, far = socket.socketpair()
    with near, far, open(os.devnull) as null:
        socket.send_fds(far, [b"frame1"], [null.fileno(), null.fileno()])
        far.send(b"frame2")
        landed, flow = receiving(100, at_least=6)
        assert pump(near, flow) is PumpEnd.IN_DONE
        assert landed[: flow.into.moved] == b"frame1"
        taken = flow.take_descriptor()
        assert taken is not None
        assert os.fstat(taken).st_rdev == os.fstat(null.fileno()).st_rdev
        assert not os.get_inheritable(taken)
        os.close(taken)
        assert flow.take_descriptor() is None


def test_an_untaken_descriptor_is_closed_by_the_next_one() -> None:
    near, far = socket.socketpair()
    landed, flow = bytearray(1), Flow()
    with near, far, open(os.devnull) as null:
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            socket.send_fds(far, [b"x"], [null.fileno()])
            flow.receive(cut(landed))
            assert pump(near, flow) is PumpEnd.IN_DONE
        assert len(os.listdir("/proc/self/fd")) == before + 1
        taken = flow.take_descriptor()
        assert taken is not None
        os.close(taken)
