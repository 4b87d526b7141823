"""The parser by itself: any bytes are a frame, or a violation, and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import MoonserveError
from tests.thoroughness import examples
from transfer import address, scatter
from transfer.base import Credentials
from transfer.scatter import Rows
from transfer.tcp import handshake
from transfer.tcp.connection import Connection
from transfer.tcp.frames import HEADER_BYTES, Header, Kind, ProtocolViolation, decode, encode, receive_rows, request

often = settings(max_examples=examples(150), deadline=None)
u64 = st.integers(0, 2**64 - 1)
T = TypeVar("T")
CREDENTIALS = Credentials(b"token", bytes(16))


def fed(data: bytes, work: Callable[[Connection], T]) -> T:
    """`work` on a connection whose peer says `data` and hangs up."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with closing(Connection(ours)) as connection:
            return work(connection)


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

    def read(connection: Connection) -> tuple[Header, Rows]:
        arrived = decode(connection.receive_bytes(HEADER_BYTES))
        return arrived, receive_rows(connection, arrived, sealed=True)

    arrived, found = fed(bytes(frame), read)
    assert arrived == header
    assert np.array_equal(found, sent)
    frame[place % len(frame)] ^= 1 << bit

    with pytest.raises(MoonserveError):
        fed(bytes(frame), read)


@often
@given(st.binary(max_size=300))
def test_either_end_survives_any_handshake_and_believes_none(data: bytes) -> None:
    def respond(connection: Connection) -> None:
        handshake.respond(connection, CREDENTIALS, 7, checksums=True)

    def initiate(connection: Connection) -> None:
        handshake.initiate(connection, CREDENTIALS, bytes(16), checksums=True)

    hello = handshake._HELLO.pack(b"MOONXFER", 2, 1, bytes(32))
    challenge = handshake._CHALLENGE.pack(b"MOONXFER", 0, 2, 1, bytes(32))
    for said, answer in ((data, respond), (hello + data, respond), (data, initiate), (challenge + data, initiate)):
        with pytest.raises(MoonserveError):
            fed(said, answer)


@often
@given(st.text(max_size=200))
def test_any_text_is_an_address_or_an_error(text: str) -> None:
    for candidate in (text, f"ms2;{text}", f"ms2;id=00;host=h;tcp={text}"):
        with suppress(MoonserveError):
            address.parse(str(address.parse(candidate)))
