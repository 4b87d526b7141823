"""Moving bytes over a stream socket in both directions at once, in C as in Python."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.patience import PATIENCE_S
from tests.thoroughness import examples
from transfer.native import DataPlane, End, Flow, IoVectors, address_of, vectors

SECOND = 1_000_000_000
LONG = int(PATIENCE_S * SECOND)
Sockets = tuple[socket.socket, socket.socket]


def unix_pair() -> Sockets:
    return socket.socketpair()


def tcp_pair() -> Sockets:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


@pytest.fixture(params=[unix_pair, tcp_pair])
def pair(request: pytest.FixtureRequest) -> Iterator[Sockets]:
    near, far = request.param()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        yield near, far


def of(buffer: bytes | bytearray | np.ndarray) -> IoVectors:
    return vectors((address_of(buffer), len(buffer)))


def cut(buffer: bytes | bytearray, lengths: list[int]) -> IoVectors:
    """The whole buffer, in pieces of these lengths and one of what is left."""
    base, pieces, place = address_of(buffer), [], 0
    for length in lengths:
        length = min(length, len(buffer) - place)
        pieces.append((base + place, length))
        place += length
    return vectors(*pieces, (base + place, len(buffer) - place))


def drive(plane: DataPlane, sock: socket.socket, flow: Flow) -> End:
    """Until both directions are done, or the end."""
    while True:
        end = plane.pump(sock.fileno(), flow, timeout_ns=SECOND // 10, spin_ns=20_000)
        if end in (End.HANGUP, End.ERROR) or (flow.out.empty and flow.into.empty):
            return end


def test_two_ends_that_both_send_first_do_not_block_each_other(
    plane: DataPlane, pair: Sockets
) -> None:
    size, rng = 6 << 20, random.Random(0)
    sent = [rng.randbytes(size), rng.randbytes(size)]
    received = [bytearray(size), bytearray(size)]

    def run(end: int) -> None:
        flow = Flow()
        flow.send(cut(sent[end], [rng.randint(0, 100_000) for _ in range(50)]))
        flow.receive(cut(received[end], [rng.randint(0, 100_000) for _ in range(50)]))
        drive(plane, pair[end], flow)

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    assert received[0] == sent[1]
    assert received[1] == sent[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30))
@example(out=[3] * 5000, into=[7] * 3000, size=30_000)  # more than one system call takes
@given(
    out=st.lists(st.integers(0, 50), max_size=20),
    into=st.lists(st.integers(0, 50), max_size=20),
    size=st.integers(1, 500),
)
def test_pieces_of_any_length_on_either_side_are_one_stream(
    plane: DataPlane, out: list[int], into: list[int], size: int
) -> None:
    content, landed = random.Random(size).randbytes(size), bytearray(size)
    near, far = unix_pair()
    with near, far:
        sender, receiver = Flow(), Flow()
        sender.send(cut(content, out))
        receiver.receive(cut(landed, into))
        before = [sender.out.array.copy(), receiver.into.array.copy()]
        assert plane.pump(near.fileno(), sender, timeout_ns=LONG, spin_ns=0) is End.OUT_DONE
        assert plane.pump(far.fileno(), receiver, timeout_ns=LONG, spin_ns=0) is End.IN_DONE
    assert landed == content
    assert sender.out.moved == receiver.into.moved == size
    # The caller's arrays are as they were.
    assert np.array_equal(before[0], sender.out.array)
    assert np.array_equal(before[1], receiver.into.array)


def test_a_timeout_keeps_what_has_moved_and_the_next_call_goes_on(
    plane: DataPlane, pair: Sockets
) -> None:
    near, far = pair
    landed, flow = bytearray(10), Flow()
    flow.receive(cut(landed, [3, 3]))
    far.send(b"01234")
    while flow.into.moved < 5:
        assert plane.pump(near.fileno(), flow, timeout_ns=SECOND // 100, spin_ns=0) is End.TIMEOUT
    assert (flow.into.moved, flow.into.index, flow.into.offset) == (5, 1, 2)
    far.send(b"56789")
    assert plane.pump(near.fileno(), flow, timeout_ns=LONG, spin_ns=0) is End.IN_DONE
    assert landed == b"0123456789"


def test_no_time_at_all_does_what_is_possible_at_once(plane: DataPlane, pair: Sockets) -> None:
    landed, flow = bytearray(1), Flow()
    flow.send(of(b"out"))
    flow.receive(of(landed))
    assert plane.pump(pair[0].fileno(), flow, timeout_ns=0, spin_ns=SECOND) is End.TIMEOUT
    assert flow.out.empty
    assert plane.pump(pair[0].fileno(), Flow(), timeout_ns=0, spin_ns=0) is End.OUT_DONE


def test_input_that_is_complete_ends_the_call_whatever_is_left_to_send(
    plane: DataPlane, pair: Sockets
) -> None:
    near, far = pair
    far.send(b"answer")
    landed, flow, much = bytearray(6), Flow(), bytes(32 << 20)
    flow.send(of(much))
    flow.receive(of(landed))
    assert plane.pump(near.fileno(), flow, timeout_ns=LONG, spin_ns=0) is End.IN_DONE
    assert landed == b"answer"
    assert 0 < flow.out.moved < len(much)
    before = flow.out.moved
    while len(far.recv(1 << 20)) == 1 << 20:
        pass
    while flow.out.moved == before:
        assert plane.pump(near.fileno(), flow, timeout_ns=SECOND // 100, spin_ns=0) is End.TIMEOUT


def test_what_is_added_comes_behind_what_is_left(plane: DataPlane) -> None:
    near, far = unix_pair()
    parts = [random.Random(i).randbytes(1 << 20) for i in range(3)]
    landed, sender, receiver = bytearray(3 << 20), Flow(), Flow()
    with near, far:
        for part in parts:
            sender.send(of(part))
            plane.pump(near.fileno(), sender, timeout_ns=0, spin_ns=0)
        receiver.receive(of(landed))
        while not receiver.into.empty:
            plane.pump(near.fileno(), sender, timeout_ns=0, spin_ns=0)
            plane.pump(far.fileno(), receiver, timeout_ns=0, spin_ns=0)
    assert landed == b"".join(parts)


def test_the_peers_end_is_told_after_all_that_it_sent(plane: DataPlane, pair: Sockets) -> None:
    near, far = pair
    far.send(b"last words")
    far.close()
    landed, flow = bytearray(20), Flow()
    flow.receive(of(landed))
    assert plane.pump(near.fileno(), flow, timeout_ns=LONG, spin_ns=0) is End.HANGUP
    assert landed[: flow.into.moved] == b"last words"


def test_a_broken_pipe_raises_no_signal_and_what_came_before_it_is_still_read(
    plane: DataPlane,
) -> None:
    near, far = unix_pair()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        far.send(b"refused")
        far.close()
        landed, flow = bytearray(7), Flow()
        flow.send(of(b"x" * 100))
        flow.receive(cut(landed, [3]))
        assert plane.pump(near.fileno(), flow, timeout_ns=LONG, spin_ns=0) is End.IN_DONE
        assert landed == b"refused"
        assert plane.pump(near.fileno(), flow, timeout_ns=LONG, spin_ns=0) is End.HANGUP
    finally:
        signal.signal(signal.SIGPIPE, before)
        near.close()


def test_any_other_failure_is_an_error_number(plane: DataPlane) -> None:
    near, far = unix_pair()
    fd = near.fileno()
    near.close()
    far.close()
    landed, flow = bytearray(1), Flow()
    flow.receive(of(landed))
    assert plane.pump(fd, flow, timeout_ns=LONG, spin_ns=0) is End.ERROR
    assert flow.error == errno.EBADF


def test_an_idle_wait_costs_no_processor_time(plane: DataPlane, pair: Sockets) -> None:
    landed, flow = bytearray(1), Flow()
    flow.receive(of(landed))
    began = time.thread_time()
    end = plane.pump(pair[0].fileno(), flow, timeout_ns=SECOND // 5, spin_ns=SECOND // 1000)
    assert end is End.TIMEOUT
    assert time.thread_time() - began < 0.05


def test_a_spin_for_nothing_is_not_repeated_at_once(plane: DataPlane, pair: Sockets) -> None:
    near, far = pair
    landed, flow = bytearray(2), Flow()
    far.send(b"a")
    flow.receive(of(landed))
    wait_ns, spent = SECOND // 20, []
    for _ in range(3):
        began = time.thread_time_ns()
        assert plane.pump(near.fileno(), flow, timeout_ns=wait_ns, spin_ns=SECOND) is End.TIMEOUT
        spent.append(time.thread_time_ns() - began)
    assert max(spent[1:]) < wait_ns // 2


def test_a_descriptor_comes_with_the_bytes_it_was_sent_with(plane: DataPlane) -> None:
    near, far = unix_pair()
    with near, far, open(os.devnull) as null:
        socket.send_fds(far, [b"frame1"], [null.fileno(), null.fileno()])
        far.send(b"frame2")
        landed, flow = bytearray(100), Flow()
        flow.receive(of(landed), at_least=6)
        assert plane.pump(near.fileno(), flow, timeout_ns=LONG, spin_ns=0) is End.IN_DONE
        assert landed[: flow.into.moved] == b"frame1"
        taken = flow.take_descriptor()
        assert taken is not None
        assert os.fstat(taken).st_rdev == os.fstat(null.fileno()).st_rdev
        assert not os.get_inheritable(taken)
        os.close(taken)
        assert flow.take_descriptor() is None


def test_a_descriptor_that_nobody_took_is_closed_by_the_next(plane: DataPlane) -> None:
    near, far = unix_pair()
    landed, flow = bytearray(1), Flow()
    with near, far, open(os.devnull) as null:
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            socket.send_fds(far, [b"x"], [null.fileno()])
            flow.receive(of(landed))
            assert plane.pump(near.fileno(), flow, timeout_ns=LONG, spin_ns=0) is End.IN_DONE
        assert len(os.listdir("/proc/self/fd")) == before + 1
        taken = flow.take_descriptor()
        assert taken is not None
        os.close(taken)
