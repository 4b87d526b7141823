"""The parser by itself: any bytes are a frame, or a violation, and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import MoonserveError
from tests.thoroughness import examples
from transfer import address, scatter
from transfer.base import Credentials
from transfer.tcp import handshake
from transfer.tcp.connection import Connection
from transfer.tcp.frames import HEADER_BYTES, Header, Kind, ProtocolViolation, decode, encode, receive_rows, request

often = settings(max_examples=examples(150), deadline=None)
u64 = st.integers(0, 2**64 - 1)
CREDENTIALS = Credentials(b"token", bytes(16))


def fed(data: bytes, work: Callable[[Connection], None]) -> None:
    """`work` on a connection whose peer says `data` and hangs up."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        connection = Connection(ours)
        try:
            work(connection)
        finally:
            connection.close()


@often
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_are_a_header_or_a_violation(data: bytes) -> None:
    with suppress(ProtocolViolation):
        assert encode(decode(data)) == data


@often
@given(
    st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3), max_size=5), st.integers(0, 10_000), st.integers(0, 7)
)
def test_a_sealed_request_is_read_as_it_was_sent_or_not_at_all(
    rows: list[tuple[int, int, int]], place: int, bit: int
) -> None:
    sent = scatter.rows(*rows)
    header = Header(Kind.READ, entries=len(sent), segment_id=3)
    frame = bytearray(request(header, sent, sealed=True))

    def read(connection: Connection) -> None:
        arrived = decode(connection.receive_bytes(HEADER_BYTES))
        assert arrived == header
        assert np.array_equal(receive_rows(connection, arrived, sealed=True), sent)

    fed(bytes(frame), read)
    frame[place % len(frame)] ^= 1 << bit

    def refuse(connection: Connection) -> None:
        with suppress(MoonserveError):
            receive_rows(connection, decode(connection.receive_bytes(HEADER_BYTES)), sealed=True)
            raise AssertionError("a damaged request was read")

    fed(bytes(frame), refuse)


@often
@given(st.binary(max_size=300))
def test_a_target_survives_any_handshake(data: bytes) -> None:
    def respond(connection: Connection) -> None:
        with suppress(MoonserveError):
            handshake.respond(connection, CREDENTIALS, 7, checksums=True)
            raise AssertionError("a stranger was let in")

    fed(data, respond)
    fed(handshake._HELLO.pack(b"MOONXFER", 2, 1, bytes(32)) + data, respond)


@often
@given(st.binary(max_size=300))
def test_an_initiator_survives_any_handshake(data: bytes) -> None:
    def initiate(connection: Connection) -> None:
        with suppress(MoonserveError):
            handshake.initiate(connection, CREDENTIALS, bytes(16), checksums=True)
            raise AssertionError("a stranger was believed")

    fed(data, initiate)
    fed(handshake._CHALLENGE.pack(b"MOONXFER", 0, 2, 1, bytes(32)) + data, initiate)


@often
@given(st.text(max_size=200))
def test_any_text_is_an_address_or_an_error(text: str) -> None:
    for candidate in (text, f"ms2;{text}", f"ms2;id=00;host=h;tcp={text}"):
        with suppress(MoonserveError):
            address.parse(str(address.parse(candidate)))
