"""Faults of those who are not what they claim, or speak of what is no more."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import replace

from protocol.errors import (
    Incompatible,
    InvalidRequest,
    MoonserveError,
    PeerLost,
    StaleLease,
    Unauthenticated,
)
from tests.patience import NEVER_S
from tests.transfer.stage import (
    GUARD,
    NBYTES,
    Guarded,
    Stage,
    code_of_answer,
    dial,
    fault,
    request_of,
    until_closed,
    while_running,
)
from transfer import Op
from transfer.address import parse
from transfer.tcp import handshake
from transfer.tcp.frames import Code, Header, Kind, encode

# Those who are not what they claim.


@fault("wrong cluster token", "tcp", "shm")
def wrong_token(stage: Stage) -> str:
    stage.near = stage.engine(token="another token")
    stage.local = Guarded(stage.near, NBYTES)
    stage.run(stage.read(), error=Unauthenticated)
    assert stage.local.buffer == bytes(NBYTES)
    return "Unauthenticated, on both sides; not tried again"


def _answered(stage: Stage, answer: Callable[[bytes], bytes], error: type[MoonserveError]) -> None:
    """A READ from the address at which somebody else answers what is sent there."""
    address = parse(stage.far.address)
    (rail,) = address.rails["tcp"]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(ConnectionError):
                while data := sock.recv(1024):
                    sock.sendall(answer(data))

        there = replace(rail, endpoint=f"127.0.0.1:{listener.getsockname()[1]}")
        with while_running(serve):
            stage.run(stage.read(str(replace(address, rails={"tcp": (there,)}))), error=error)


@fault("a target that speaks another version", "tcp")
def wrong_version(stage: Stage) -> str:
    challenge = handshake._CHALLENGE.pack(b"MOONXFER", 0, 99, 0, bytes(32))
    _answered(stage, lambda _: challenge, Incompatible)
    return "Incompatible, with both versions named; not tried again"


@fault("something else answers on the target's port", "tcp")
def no_engine(stage: Stage) -> str:
    page = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" + bytes(100)
    _answered(stage, lambda _: page, PeerLost)
    return "PeerLost"


@fault("what answers on the target's port sends back what it gets", "tcp", deadline_s=NEVER_S)
def echo(stage: Stage) -> str:
    _answered(stage, bytes, PeerLost)
    return "PeerLost, long before the deadline"


@fault("an initiator that speaks another version", "tcp", "shm")
def wrong_version_of_initiator(stage: Stage) -> str:
    connection = dial(stage.far.address)
    connection.send(handshake._HELLO.pack(b"MOONXFER", 99, 0, bytes(32)))
    answer = handshake._CHALLENGE.unpack(connection.receive_bytes(handshake._CHALLENGE.size))
    assert answer[1:3] == (Code.INCOMPATIBLE, handshake.PROTOCOL_VERSION)
    until_closed(connection)
    stage.require_served()
    return "told so, and closed; others are served"


@fault("the address of an earlier incarnation, its port taken over", "tcp", "shm")
def earlier_incarnation(stage: Stage) -> str:
    now = parse(stage.far.address)
    then = str(replace(now, instance=bytes(16)))
    stage.run(stage.read(then), error=PeerLost)
    return "PeerLost: another incarnation answers"


@fault("a segment that was deregistered, another in its place", "tcp", "shm")
def stale_segment(stage: Stage) -> str:
    stage.run(stage.read())
    transfer = stage.read()
    stage.far.close_window(stage.window_id)
    stage.far.deregister(stage.memory.segment)
    other = Guarded(stage.far, NBYTES, readable=True)
    other.buffer[:] = b"o" * NBYTES
    stage.run(transfer, error=InvalidRequest)
    stage.run(replace(transfer, op=Op.WRITE, window_id=stage.window_id), error=StaleLease)
    assert other.buffer == b"o" * NBYTES
    return "InvalidRequest: ids are never used again"


@fault("a window that was closed", "tcp", "shm")
def stale_window(stage: Stage) -> str:
    stage.run(stage.write())
    before = bytes(stage.memory.buffer)
    stage.far.close_window(stage.window_id)
    stage.far.open_window(stage.memory.segment, [(0, NBYTES)])
    stage.run(stage.write(), error=StaleLease)
    assert stage.memory.buffer == before
    return "StaleLease: ids are never used again; nothing stored"


@fault("lying offsets, sizes and row counts, from an authenticated connection", "tcp", "shm")
def lies(stage: Stage) -> str:
    before = bytes(stage.memory.buffer)
    big = 1 << 62
    refused = (
        (Kind.READ, [(NBYTES, 0, 1)], 0),
        (Kind.READ, [(-1, 0, 1)], 0),
        (Kind.READ, [(0, 0, -1)], 0),
        (Kind.READ, [(big, 0, big)], 0),
        (Kind.READ, [(0, 0, NBYTES), (NBYTES - 1, 0, 2)], 0),
        (Kind.WRITE, [(NBYTES - 1, 0, 2)], 2),
        (Kind.WRITE, [(-GUARD, 0, GUARD)], GUARD),
        (Kind.WRITE, [(0, 0, 10), (NBYTES, 0, 10)], 20),
        (Kind.WRITE, [(big, 0, 10)], 10),
    )
    unbelievable = (
        (Kind.WRITE, [(0, 0, 10)], 20),
        (Kind.WRITE, [(0, 0, -10), (0, 0, 20)], 10),
        (Kind.WRITE, [(0, 0, 1 << 63 - 1), (0, 0, 1 << 63 - 1)], 10),
    )
    headers = (
        Header(kind=Kind.READ, entries=4097, segment_id=1),
        Header(kind=Kind.WRITE, entries=1, segment_id=1, nbytes=1 << 63),
        Header(kind=Kind.REPLY, entries=1 << 20),
    )
    for kind, rows, nbytes in (*refused, *unbelievable):
        connection = stage.stranger()
        connection.send(request_of(kind, stage, rows=rows, nbytes=nbytes) + b"x" * nbytes)
        if (kind, rows, nbytes) in refused:
            assert code_of_answer(connection) is Code.INVALID_REQUEST
        else:
            until_closed(connection)
    for header in headers:
        connection = stage.stranger()
        connection.send(encode(header))
        until_closed(connection)
    assert stage.memory.buffer == before
    stage.require_served()
    return "refused (or the connection ended); nothing read or stored outside; others are served"


@fault("peers that hang up at once", "tcp", "shm")
def hang_up(stage: Stage) -> str:
    for _ in range(50):
        sock = dial(stage.far.address)._sock
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
    stage.require_served()
    return "others are served"
