"""Whatever is thrown at the listening sockets, peers are served as before."""

from __future__ import annotations

import secrets
import socket
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import Incompatible, PeerLost, Unauthenticated
from tests.thoroughness import examples
from tests.transfer.conftest import TOKEN, Pair
from transfer.address import parse
from transfer.base import Credentials
from transfer.wire import handshake
from transfer.wire.connection import Connection
from transfer.wire.frames import Header, Kind, encode

bounded = settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def dial(address: str) -> Connection:
    ((name, (rail,)),) = parse(address).rails.items()
    endpoint = rail.endpoint
    if name == "shm":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + endpoint)
    else:
        host, _, port = endpoint.rpartition(":")
        sock = socket.create_connection((host, int(port)))
    connection = Connection(sock)
    connection.set_deadline(time.monotonic() + 10)
    return connection


def authenticated(address: str) -> Connection:
    connection = dial(address)
    credentials = Credentials(TOKEN.encode(), b"")
    handshake.initiate(connection, credentials, parse(address).instance, checksums=True)
    return connection


def until_closed(connection: Connection) -> None:
    with pytest.raises(PeerLost):
        connection.discard(1 << 30)
    connection.close()


@bounded
@given(garbage=st.binary(min_size=1, max_size=200))
def test_garbage_instead_of_a_handshake_changes_nothing(pair: Pair, garbage: bytes) -> None:
    connection = dial(pair.far.address)
    connection.send(garbage)
    connection.close()
    pair.run(pair.read(0, 0, 10))


@bounded
@given(garbage=st.binary(min_size=64, max_size=200))
def test_garbage_from_a_peer_ends_its_connection_only(pair: Pair, garbage: bytes) -> None:
    connection = authenticated(pair.far.address)
    connection.send(garbage)
    until_closed(connection)
    pair.run(pair.read(0, 0, 10))


@bounded
@given(
    kind=st.sampled_from([Kind.READ, Kind.WRITE, Kind.WRITE_FROM, Kind.MAP, Kind.OFFER]),
    count=st.integers(0, 3),
    numbers=st.integers(0, 2**64 - 1),
    rows=st.binary(min_size=72, max_size=72),
)
def test_well_formed_nonsense_is_refused_and_stores_nothing(
    pair: Pair, kind: Kind, count: int, numbers: int, rows: bytes
) -> None:
    before = bytes(pair.memory.buffer)
    connection = authenticated(pair.far.address)
    header = Header(
        kind=kind, entries=count, segment_id=numbers, window_id=numbers, source_id=numbers
    )
    connection.send(encode(header) + rows[: 24 * count])
    connection.close()
    pair.run(pair.read(0, 0, 10))
    assert pair.memory.buffer == before


def test_a_wrong_protocol_version_is_told_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = dial(pair.far.address)
    connection.send(handshake._HELLO.pack(b"MOONXFER", 99, 0, secrets.token_bytes(32)))
    answer = connection.receive_bytes(handshake._CHALLENGE.size)
    assert handshake._CHALLENGE.unpack(answer)[1:3] == (3, handshake.PROTOCOL_VERSION)
    until_closed(connection)


@pytest.mark.parametrize(
    ("version", "proof", "error"),
    [(99, b"", Incompatible), (2, bytes(32), Unauthenticated)],
    ids=["other version", "no token"],
)
def test_an_initiator_checks_the_target(version: int, proof: bytes, error: type[Exception]) -> None:
    ours, theirs = socket.socketpair()
    impostor, initiator = Connection(theirs), Connection(ours)
    impostor.send(handshake._CHALLENGE.pack(b"MOONXFER", 0, version, 0, bytes(32)))
    if proof:
        impostor.send(handshake._WELCOME.pack(0, 7, proof))
    with pytest.raises(error):
        handshake.initiate(initiator, Credentials(b"token", b""), bytes(16), checksums=True)
    impostor.close()
    initiator.close()


def test_a_proof_cannot_be_reflected_or_replayed(pair: Pair) -> None:
    """A stranger relays the target's own answers back to it and never gets in."""
    connection = dial(pair.far.address)
    nonce = secrets.token_bytes(32)
    connection.send(handshake._HELLO.pack(b"MOONXFER", 2, 0, nonce))
    connection.receive_bytes(handshake._CHALLENGE.size)
    connection.send(handshake._PROOF.pack(nonce, parse(pair.far.address).instance))
    status, _, answer = handshake._WELCOME.unpack(connection.receive_bytes(handshake._WELCOME.size))
    assert (status, answer) == (4, bytes(32))
    until_closed(connection)


def test_many_silent_strangers_do_not_keep_peers_out(pair: Pair) -> None:
    before = threading.active_count()
    strangers = [dial(pair.far.address) for _ in range(50)]
    pair.run(pair.read(0, 0, 10))
    for stranger in strangers:
        stranger.close()
    assert threading.active_count() <= before + 60
