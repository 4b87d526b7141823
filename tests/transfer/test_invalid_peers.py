"""Peers with a false identity, or with ids that are no longer valid, get no data and neither end nor block others."""

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonserve.protocol import errors
from moonserve.transfer import Op
from moonserve.transfer.memory.data_plane import SEAL_BYTES
from moonserve.transfer.paths.peer_address import parse_address
from moonserve.transfer.tcp import handshake
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.tcp.frames import Code, Header, Kind, encode
from moonserve.transfer.transport_interface import Credentials
from tests.patience import NEVER_S, until
from tests.thoroughness import examples
from tests.transfer.conftest import Pair
from tests.transfer.peer_process import TOKEN
from tests.transfer.stage import (
    GUARD,
    NBYTES,
    Guarded,
    Stage,
    authenticated,
    code_of_answer,
    dial,
    request_of,
    until_closed,
)

only_tcp = pytest.mark.parametrize("transport", ["tcp"])


@pytest.mark.parametrize("transport", ["shm", "tcp", "tls"])
def test_another_cluster_token_is_refused(stage: Stage) -> None:
    stage.near = stage.engine("another token")
    stage.local = Guarded(stage.near, NBYTES)
    stage.run(stage.transfer(Op.READ), error=errors.Unauthenticated)
    assert stage.local.buffer == bytes(NBYTES)


PAGE = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" + bytes(100)
NEWER = handshake._CHALLENGE.pack(b"MOONXFER", 0, 99, 0, bytes(32))


@only_tcp
@pytest.mark.parametrize(
    ("answer", "error"),
    [(lambda _: NEWER, errors.Incompatible), (lambda _: PAGE, errors.PeerLost), (bytes, errors.PeerLost)],
    ids=["another version", "no engine", "an echo"],
)
def test_another_program_on_the_targets_port_is_a_lost_peer(
    stage: Stage, answer: Callable[[bytes], bytes], error: type[errors.MoonserveError]
) -> None:
    address = parse_address(stage.far.address)
    (rail,) = address.rails["tcp"]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(ConnectionError):
                while data := sock.recv(1024):
                    sock.sendall(answer(data))

        there = replace(rail, endpoint=f"127.0.0.1:{listener.getsockname()[1]}")
        text = str(replace(address, rails={"tcp": (there,)}))
        thread = threading.Thread(target=serve)
        thread.start()
        stage.run(stage.transfer(Op.READ, text), error=error, deadline_s=NEVER_S)
        thread.join()


@only_tcp
def test_a_target_without_the_token_is_refused(transport: str) -> None:
    ours, theirs = socket.socketpair()
    with closing(Connection(theirs)) as impostor, closing(Connection(ours)) as initiator:
        impostor.send(handshake._CHALLENGE.pack(b"MOONXFER", 0, handshake.PROTOCOL_VERSION, 0, bytes(32)))
        impostor.send(handshake._WELCOME.pack(0, 7, bytes(32)))
        with pytest.raises(errors.Unauthenticated):
            handshake.initiate(initiator, Credentials(b"token", b""), bytes(16), checksums=True)


def test_an_earlier_incarnation_whose_port_was_taken_over_is_lost(stage: Stage) -> None:
    then = str(replace(parse_address(stage.far.address), instance=bytes(16)))
    stage.run(stage.transfer(Op.READ, then), error=errors.PeerLost)


def test_the_successor_of_a_segment_or_window_is_not_reached(stage: Stage) -> None:
    """Ids of segments and windows are never reused."""
    write, read = stage.transfer(Op.WRITE), stage.transfer(Op.READ)
    stage.run(read)
    before = bytes(stage.memory.buffer)
    stage.far.close_window(stage.window_id)
    again = stage.far.open_window(stage.memory.segment, [(0, NBYTES)])
    stage.run(write, error=errors.StaleLease)
    assert stage.memory.buffer == before
    stage.far.close_window(again)
    stage.far.deregister(stage.memory.segment)
    other = Guarded(stage.far, NBYTES, readable=True)
    other.buffer[:] = b"o" * NBYTES
    stage.run(read, error=errors.InvalidRequest)
    stage.run(write, error=errors.StaleLease)
    assert other.buffer == b"o" * NBYTES


def test_an_initiator_of_another_version_is_notified(stage: Stage) -> None:
    with closing(dial(stage.far.address)) as connection:
        connection.send(handshake._HELLO.pack(b"MOONXFER", 99, 0, bytes(32)))
        answer = handshake._CHALLENGE.unpack(connection.receive_bytes(handshake._CHALLENGE.size))
        assert answer[1:3] == (Code.INCOMPATIBLE, handshake.PROTOCOL_VERSION)
        until_closed(connection)
    stage.require_served()


def test_a_proof_cannot_be_reflected_or_replayed(stage: Stage) -> None:
    """A recorded proof, the target's own proof and the nonce are refused, and the refusal carries no proof."""
    nonce, instance = secrets.token_bytes(32), parse_address(stage.far.address).instance

    def shake_hands(proof_for: Callable[[int, bytes], bytes]) -> tuple[int, bytes, bytes]:
        """Returns the target's status, the proof sent and the proof received."""
        connection = dial(stage.far.address)
        connection.send(handshake._HELLO.pack(b"MOONXFER", handshake.PROTOCOL_VERSION, 0, nonce))
        challenge = handshake._CHALLENGE.unpack(connection.receive_bytes(handshake._CHALLENGE.size))
        proof = proof_for(*challenge[3:])
        connection.send(handshake._PROOF.pack(proof, instance))
        status, _, answer = handshake._WELCOME.unpack(connection.receive_bytes(handshake._WELCOME.size))
        if status:
            until_closed(connection)
        connection.close()
        return status, proof, answer

    def honest(flags: int, theirs: bytes) -> bytes:
        return handshake._Proof(TOKEN.encode(), flags, nonce, theirs, instance).of(b"initiator")

    status, proof, answer = shake_hands(honest)
    assert status == 0
    for stolen in (proof, answer, nonce):
        assert shake_hands(lambda _flags, _theirs, stolen=stolen: stolen) == (4, stolen, bytes(32))


BIG = 1 << 62
REFUSED = (
    (Kind.READ, [(NBYTES, 0, 1)], 0),
    (Kind.READ, [(-1, 0, 1)], 0),
    (Kind.READ, [(0, 0, -1)], 0),
    (Kind.READ, [(BIG, 0, BIG)], 0),
    (Kind.READ, [(0, 0, NBYTES), (NBYTES - 1, 0, 2)], 0),
    (Kind.WRITE, [(NBYTES - 1, 0, 2)], 2),
    (Kind.WRITE, [(-GUARD, 0, GUARD)], GUARD),
    (Kind.WRITE, [(0, 0, 10), (NBYTES, 0, 10)], 20),
    (Kind.WRITE, [(BIG, 0, 10)], 10),
)
UNBELIEVABLE = (
    (Kind.WRITE, [(0, 0, 10)], 20),
    (Kind.WRITE, [(0, 0, -10), (0, 0, 20)], 10),
    (Kind.WRITE, [(0, 0, 1 << 63 - 1), (0, 0, 1 << 63 - 1)], 10),
)
IMPOSSIBLE = (
    Header(kind=Kind.READ, entries=4097, segment_id=1),
    Header(kind=Kind.WRITE, entries=1, segment_id=1, nbytes=1 << 63),
    Header(kind=Kind.REPLY, entries=1 << 20),
)


def test_false_offsets_sizes_and_row_counts_reach_no_memory_outside(stage: Stage) -> None:
    before = bytes(stage.memory.buffer)
    for lies in (REFUSED, UNBELIEVABLE):
        for kind, rows, nbytes in lies:
            connection = stage.stranger()
            payload = bytes(nbytes + SEAL_BYTES) if kind is Kind.WRITE else b""
            connection.send(request_of(kind, stage, rows=rows, nbytes=nbytes) + payload)
            if lies is REFUSED:
                assert code_of_answer(connection) is Code.INVALID_REQUEST
            else:
                until_closed(connection)
    for header in IMPOSSIBLE:
        connection = stage.stranger()
        connection.send(encode(header))
        until_closed(connection)
    assert stage.memory.buffer == before
    stage.require_served()


def test_unauthenticated_connections_do_not_keep_peers_out(stage: Stage) -> None:
    """Honest peers are still served, and the threads of the strangers end."""
    before = threading.active_count()
    for _ in range(50):
        sock = dial(stage.far.address)._sock
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
    silent = [dial(stage.far.address) for _ in range(50)]
    stage.require_served()
    for stranger in silent:
        stranger.close()
    until(lambda: threading.active_count() <= before + 5)  # connections that are served have threads


nonsense = st.builds(
    lambda kind, number, rows: encode(Header(kind, 0, len(rows) // 24, *[number] * 3)) + rows,  # type: ignore[arg-type]
    st.sampled_from([Kind.READ, Kind.WRITE, Kind.WRITE_FROM, Kind.MAP, Kind.OFFER, Kind.LEASE]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 3).flatmap(lambda count: st.binary(min_size=24 * count, max_size=24 * count)),
)


@pytest.mark.parametrize("transport", ["shm", "tcp", pytest.param("rdma", marks=pytest.mark.slow)])
@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(is_peer=st.booleans(), said=st.binary(min_size=1, max_size=200) | nonsense, waits=st.booleans())
def test_invalid_handshakes_and_requests_end_only_their_connection(
    pair: Pair, is_peer: bool, said: bytes, waits: bool
) -> None:
    before = bytes(pair.memory.buffer)
    with closing((authenticated if is_peer else dial)(pair.far.address)) as connection:
        connection.send(said)
        if waits:
            with suppress(OSError):  # the connection may have ended already
                connection._sock.shutdown(socket.SHUT_WR)
            until_closed(connection)
    pair.run(pair.read(0, 0, 10))
    assert pair.memory.buffer == before
