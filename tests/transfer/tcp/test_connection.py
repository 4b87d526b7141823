"""Both ends of a stream socket: what is kept alive, and that every wait has an end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from protocol.errors import PeerLost
from transfer.native import address_of, vectors
from transfer.tcp.connection import Connection


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


def test_what_was_sent_is_let_go_although_the_queue_never_runs_empty(ends: tuple[Connection, socket.socket]) -> None:
    connection, theirs = ends
    theirs.setblocking(False)
    payload = bytearray(1 << 20)
    pieces = vectors((address_of(payload), 1 << 19), (address_of(payload) + (1 << 19), 1 << 19))
    connection.queue(b"header", pieces.copy(), payload)
    for _ in range(50):
        connection.queue(b"header", pieces.copy(), payload)
        received = 0
        while received < len(payload):  # always one frame behind
            connection._pump(0)
            with contextlib.suppress(BlockingIOError):
                received += len(theirs.recv(1 << 16))
        assert not connection._flow.out.empty
        assert len(connection._kept) <= 4


def test_what_is_pushed_leaves_without_a_wait(ends: tuple[Connection, socket.socket]) -> None:
    connection, theirs = ends
    connection.queue(b"header")
    connection.push()
    assert theirs.recv(16, socket.MSG_DONTWAIT) == b"header"


def test_a_push_to_a_peer_that_is_gone_is_told_by_the_next_wait(ends: tuple[Connection, socket.socket]) -> None:
    connection, theirs = ends
    theirs.close()
    connection.queue(b"header")
    connection.push()
    with pytest.raises(PeerLost):
        connection.receive_bytes(1)


def test_a_sender_that_trickles_meets_the_deadline(ends: tuple[Connection, socket.socket]) -> None:
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
