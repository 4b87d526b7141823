"""Whatever is thrown at the listening sockets, peers are served as before."""

from __future__ import annotations

import secrets
import socket
import threading
from contextlib import closing, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import Incompatible, Unauthenticated
from tests.thoroughness import examples
from tests.transfer.conftest import TOKEN, Pair
from tests.transfer.stage import dial, until_closed
from transfer.address import parse
from transfer.base import Credentials
from transfer.tcp import handshake
from transfer.tcp.connection import Connection
from transfer.tcp.frames import Header, Kind, encode


@pytest.fixture(params=["shm", "tcp", pytest.param("rdma", marks=pytest.mark.slow)])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def authenticated(address: str) -> Connection:
    connection = dial(address)
    credentials = Credentials(TOKEN.encode(), b"")
    handshake.initiate(connection, credentials, parse(address).instance, checksums=True)
    return connection


nonsense = st.builds(
    lambda kind, number, rows: encode(Header(kind, 0, len(rows) // 24, *[number] * 3)) + rows,  # type: ignore[arg-type]
    st.sampled_from([Kind.READ, Kind.WRITE, Kind.WRITE_FROM, Kind.MAP, Kind.OFFER]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 3).flatmap(lambda count: st.binary(min_size=24 * count, max_size=24 * count)),
)


@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    is_peer=st.booleans(), said=st.binary(min_size=1, max_size=200) | nonsense, waits=st.booleans()
)
def test_what_is_no_handshake_or_no_request_ends_its_connection_only_and_stores_nothing(
    pair: Pair, is_peer: bool, said: bytes, waits: bool
) -> None:
    before = bytes(pair.memory.buffer)
    with closing((authenticated if is_peer else dial)(pair.far.address)) as connection:
        connection.send(said)
        if waits:
            with suppress(OSError):  # it has ended already
                connection._sock.shutdown(socket.SHUT_WR)
            until_closed(connection)
    pair.run(pair.read(0, 0, 10))
    assert pair.memory.buffer == before


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
