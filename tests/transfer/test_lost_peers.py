"""Peers in other processes that are stopped or forgotten: every batch ends in time. See also test_faulty_links.py."""

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from moonserve.protocol.errors import Incompatible, InvalidRequest, PeerLost
from moonserve.transfer import FaultPlan, Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from moonserve.transfer.paths.lane import Lane
from moonserve.transfer.paths.peer_address import Rail, parse_address
from moonserve.transfer.tcp import transport as tcp
from tests.patience import NEVER_S, PATIENCE_S, until
from tests.transfer.conftest import Make, MakePair, Pair, PeerInProcess, run
from tests.transfer.stage import WritesTo

TRANSPORTS = ["shm", "tcp", pytest.param("tls", marks=pytest.mark.slow)]


@pytest.mark.parametrize("registered", [False, True])
def test_two_processes_read_and_write_each_other(make_engine: Make, peer: PeerInProcess, registered: bool) -> None:
    engine, nbytes = make_engine(), 4 << 20
    remote, window_id = peer.lend(nbytes, 7)
    local = engine.register(bytearray(nbytes)) if registered else engine.allocate(nbytes)
    for seed in range(2):
        local.buffer[:] = sent = random.Random(seed).randbytes(nbytes)
        run(engine, Transfer(Op.WRITE, local, 0, remote, 4096, nbytes - 8192, window_id))
        content = peer.content(remote)
        assert content == b"\7" * 4096 + sent[:-8192] + b"\7" * 4096
    read = Transfer(Op.READ, local, 0, remote, 0, nbytes)
    run(engine, read)
    assert local.buffer == content
    local.buffer[:] = bytes(nbytes)
    engine.run([read], deadline_s=PATIENCE_S)  # in this thread if the transport can
    assert local.buffer == content


def test_open_waits_for_a_silent_peer_until_the_deadline(
    make_engine: Make, peer: PeerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle connection is not given up for silence: that is done only if a batch is in flight on it and another path
    is left. Here neither is the case, so `open` may use its whole time."""
    looks: list[Lane] = []
    tick = Lane.tick

    def count(lane: Lane) -> None:
        looks.append(lane)
        tick(lane)

    monkeypatch.setattr(Lane, "tick", count)
    monkeypatch.setattr("moonserve.transfer.tcp.session._SILENCE_S", 0.0)
    to = WritesTo(make_engine(), peer)
    run(to.engine, to.transfer)
    peer.stop()
    looks.clear()
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(to.engine.open, to.remote.address, deadline_s=NEVER_S)
        until(lambda: len(looks) > 3 or opening.done())
        peer.resume()
        assert opening.result(PATIENCE_S)


@pytest.mark.parametrize("transport", ["shm"])
def test_slices_that_ended_before_the_silence_stay_ended(make_engine: Make, peer: PeerInProcess) -> None:
    """Completed parts stay completed. Mapped memory can be read while its owner is stopped; only the owner stores."""
    to = WritesTo(make_engine(), peer)
    run(to.engine, to.read, to.transfer)
    peer.stop()
    batch = to.engine.submit([to.read, to.transfer], deadline_s=NEVER_S)
    until(lambda: sum(stats.totals.bytes[0] for stats in to.engine.stats) == 2 * to.read.length)
    to.engine.forget(to.remote.address)
    with pytest.raises(PeerLost):
        batch.wait(PATIENCE_S)
    assert [type(error) for error in batch.errors] == [type(None), PeerLost]


@pytest.mark.parametrize("transport", ["tcp"])  # names of Unix sockets are never reused
def test_a_socket_that_connects_to_itself_is_a_lost_peer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP then connects the socket to itself, which would never reply or hang up. With 28,000 ports this happens once
    in about ten thousand deaths; here the port is forced."""
    address = parse_address(pair.far.address)
    (rail,) = address.rails["tcp"]
    with socket.socket() as held:  # its port has no listener and is not given to any other socket
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        host, number = held.getsockname()
        dead = replace(address, rails={"tcp": (replace(rail, endpoint=f"{host}:{number}"),)})

        def leave_by_it(sock: socket.socket, _: Rail) -> None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, number))

        monkeypatch.setattr(tcp, "_bind_to_rail", leave_by_it)
        read = Transfer(Op.READ, pair.local, 0, RemoteSegment(str(dead), 1), 0, 10)
        with pytest.raises(PeerLost, match="itself"):
            pair.run(read, deadline_s=NEVER_S)


def test_forget_and_close_fail_batches_immediately(make_engine: Make, peer: PeerInProcess) -> None:
    to = WritesTo(make_engine(), peer)
    run(to.engine, to.transfer)
    for give_up in (lambda: to.engine.forget(to.remote.address), to.engine.close):
        peer.stop()
        batches = [to.engine.submit([to.transfer], deadline_s=NEVER_S) for _ in range(3)]
        give_up()
        for batch in batches:
            with pytest.raises(PeerLost):
                batch.wait(PATIENCE_S)
        peer.resume()
        if give_up != to.engine.close:
            run(to.engine, to.transfer)  # a forgotten peer may be met again
    with pytest.raises(InvalidRequest):
        to.engine.submit([to.transfer], deadline_s=NEVER_S)


def test_an_address_without_a_reachable_rail_is_refused(pair: Pair, transport: str) -> None:
    other = TransferOptions(transports=("tcp" if transport == "shm" else "shm",))
    with TransferEngine(cluster_token="t", options=other) as stranger:
        for address, error in (
            (pair.far.address.replace("ms2", "ms3", 1), Incompatible),
            ("ms2;id=zz;host=x", InvalidRequest),
            ("nonsense", InvalidRequest),
            (stranger.address, PeerLost),
        ):
            with pytest.raises(error):
                pair.run(Transfer(Op.READ, pair.local, 0, RemoteSegment(address, 1), 0, 10))


def test_planned_faults_happen_the_given_number_of_times(make_pair: MakePair) -> None:
    """Checksums of the transfer do not detect bytes that bad memory corrupts. The checksums of blocks do."""
    pair = make_pair(100, faults=FaultPlan(corrupt_writes=1, drop_connections=1))
    expected = b"g" * 40 + bytes(pair.memory.buffer[40:60]) + b"g" * 40
    pair.local.buffer[:] = b"g" * 100
    writes = [pair.write(at, at, 40) for at in (0, 60)]
    with pytest.raises(PeerLost, match="fault"):
        pair.run(*writes)
    pair.run(*writes)
    assert sum(a != b for a, b in zip(pair.memory.buffer, expected, strict=True)) == 1
    assert pair.local.buffer == b"g" * 100
    pair.run(*writes)
    assert pair.memory.buffer == expected
    pair.near.deregister(pair.local)
    assert pair.near.usage().num_segments == 0
