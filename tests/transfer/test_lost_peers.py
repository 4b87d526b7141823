"""Peers that die, stop, restart, or were never what they seemed: every batch ends in time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from protocol.errors import Incompatible, InvalidRequest, PeerLost, Unauthenticated
from tests.patience import NEVER_S, PATIENCE_S, until
from tests.transfer.conftest import Pair, PeerInProcess
from transfer import (
    FaultPlan,
    Op,
    RemoteSegment,
    Segment,
    Transfer,
    TransferEngine,
    TransferOptions,
    tcp,
)
from transfer.address import Rail, parse
from transfer.lane import Lane

Make = Callable[..., TransferEngine]


class WritesTo:
    """A window in another process and a way to write into it."""

    def __init__(self, engine: TransferEngine, peer: PeerInProcess, nbytes: int = 4096) -> None:
        self.engine = engine
        self.address = peer.ask("address")
        self.segment_id = peer.ask("allocate", nbytes, 0, True)
        self.window_id = peer.ask("open_window", self.segment_id, [(0, nbytes)])
        self.local: Segment = engine.allocate(nbytes)
        self.local.buffer[:] = b"w" * nbytes
        remote = RemoteSegment(self.address, self.segment_id)
        self.transfer = Transfer(Op.WRITE, self.local, 0, remote, 0, nbytes, self.window_id)


def test_a_killed_peer_fails_its_batches_long_before_their_deadline(
    make_engine: Make, peer: PeerInProcess
) -> None:
    to = WritesTo(make_engine(), peer, nbytes=8 << 20)
    to.engine.submit([to.transfer], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    peer.stop()
    under_way = [to.engine.submit([to.transfer], deadline_s=NEVER_S) for _ in range(3)]
    assert not any(batch.done for batch in under_way)
    peer.process.kill()
    for batch in under_way:
        with pytest.raises(PeerLost):
            batch.wait(PATIENCE_S)
    with pytest.raises(PeerLost):
        to.engine.submit([to.transfer], deadline_s=NEVER_S).wait(PATIENCE_S)


def test_a_stopped_peer_fails_each_batch_at_its_own_deadline(
    make_engine: Make, peer: PeerInProcess
) -> None:
    to = WritesTo(make_engine(), peer)
    to.engine.submit([to.transfer], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    peer.stop()
    begin = time.monotonic()
    patient = to.engine.submit([to.transfer], deadline_s=NEVER_S)
    batches = [to.engine.submit([to.transfer], deadline_s=each) for each in (0.6, 0.1)]
    for batch, deadline_s in zip(reversed(batches), (0.1, 0.6), strict=True):
        with pytest.raises(PeerLost):
            batch.wait(PATIENCE_S)
        assert time.monotonic() - begin >= deadline_s
    assert not patient.done
    peer.resume()
    patient.wait(PATIENCE_S)
    to.engine.submit([to.transfer], deadline_s=PATIENCE_S).wait(PATIENCE_S)


def test_whoever_opens_a_silent_peer_has_all_the_time_they_gave(
    make_engine: Make, peer: PeerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch before it was carried on the same connection, which is given up when that falls silent and another way is
    left; nothing of a batch is under way now, and no other way is left."""
    looks: list[Lane] = []
    look_up = Lane.look_up

    def count(lane: Lane) -> None:
        looks.append(lane)
        look_up(lane)

    monkeypatch.setattr(Lane, "look_up", count)
    monkeypatch.setattr("transfer.wire.stream._SILENCE_S", 0.0)
    to = WritesTo(make_engine(), peer)
    to.engine.submit([to.transfer], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    peer.stop()
    looks.clear()
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(to.engine.open, to.address, deadline_s=NEVER_S)
        until(lambda: len(looks) > 3 or opening.done())
        peer.resume()
        assert opening.result(PATIENCE_S)


@pytest.mark.parametrize("transport", ["shm"])
def test_what_ended_before_the_peer_fell_silent_stays_ended(
    make_engine: Make, peer: PeerInProcess
) -> None:
    """Mapped memory can be read while its owner is stopped; only the owner can store."""
    to = WritesTo(make_engine(), peer)
    read = replace(to.transfer, op=Op.READ, window_id=None)
    to.engine.submit([read, to.transfer], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    peer.stop()
    batch = to.engine.submit([read, to.transfer], deadline_s=NEVER_S)
    until(lambda: sum(stats.read_bytes for stats in to.engine.stats) == 2 * read.length)
    to.engine.forget(to.address)
    with pytest.raises(PeerLost):
        batch.wait(PATIENCE_S)
    assert [type(error) for error in batch.errors] == [type(None), PeerLost]


def test_a_read_that_timed_out_never_touches_memory_later(
    make_engine: Make, peer: PeerInProcess
) -> None:
    engine = make_engine()
    address = peer.ask("address")
    nbytes = 8 << 20
    segment_id = peer.ask("allocate", nbytes, 9, True)
    local = engine.allocate(nbytes)
    remote = RemoteSegment(address, segment_id)
    peer.stop()
    batch = engine.submit([Transfer(Op.READ, local, 0, remote, 0, nbytes)], deadline_s=0.1)
    with pytest.raises(PeerLost):
        batch.wait(PATIENCE_S)
    after = bytes(local.buffer)
    peer.resume()
    assert peer.ask("address") == address
    assert local.buffer == after


def test_a_stopped_writer_cannot_write_once_its_window_was_closed(
    make_engine: Make, peer: PeerInProcess
) -> None:
    engine = make_engine()
    size = 8 << 20
    memory = engine.allocate(size)
    window_id = engine.open_window(memory, [(0, size)])
    peer.tell("write_until_refused", engine.address, memory.segment_id, window_id, size)
    assert peer.answer() == "started"
    peer.stop()
    engine.close_window(window_id)
    frozen = bytes(memory.buffer)
    peer.resume()
    assert peer.answer() == "stale"
    assert memory.buffer == frozen


def test_a_closing_window_does_not_wait_for_a_writer_that_went_silent(
    make_engine: Make, peer: PeerInProcess
) -> None:
    engine = make_engine()
    size = 8 << 20
    memory = engine.allocate(size)
    window_id = engine.open_window(memory, [(0, size)])
    peer.tell("write_until_refused", engine.address, memory.segment_id, window_id, size)
    assert peer.answer() == "started"
    peer.stop()
    engine.close_window(window_id)  # the writer would be waited for until this test's end
    engine.deregister(memory)


def test_another_incarnation_is_not_taken_for_the_old_peer(pair: Pair, make_engine: Make) -> None:
    old, new = parse(pair.far.address), parse(make_engine().address)
    impostor = str(replace(new, instance=old.instance))
    batch = pair.near.submit(
        [Transfer(Op.READ, pair.local, 0, RemoteSegment(impostor, 1), 0, 10)], deadline_s=PATIENCE_S
    )
    with pytest.raises(PeerLost):
        batch.wait(PATIENCE_S)


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)  # names of Unix sockets never return
def test_a_dead_peer_whose_port_is_given_to_who_dials_it_is_lost(
    pair: Pair, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP then connects the socket to itself, and nobody would ever answer or hang up. With 28,000 ports it happens
    once in some ten thousand deaths; here the port is forced."""
    address = parse(pair.far.address)
    ((name, (rail,)),) = address.rails.items()
    assert name == transport
    port = held_port()
    host, number = port.getsockname()
    dead = replace(address, rails={"tcp": (replace(rail, endpoint=f"{host}:{number}"),)})

    def leave_by_it(sock: socket.socket, _: Rail) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, number))

    monkeypatch.setattr(tcp, "_leave_by", leave_by_it)
    read = Transfer(Op.READ, pair.local, 0, RemoteSegment(str(dead), 1), 0, 10)
    with port, pytest.raises(PeerLost, match="itself"):
        pair.near.submit([read], deadline_s=NEVER_S).wait(PATIENCE_S)


def held_port() -> socket.socket:
    """Nobody listens there, and nobody else is given it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def test_a_closed_peer_is_lost_and_its_successor_is_reached(pair: Pair, make_engine: Make) -> None:
    pair.run(pair.read(0, 0, 10))
    pair.far.close()
    with pytest.raises(PeerLost):
        pair.run(pair.read(0, 0, 10))
    successor = make_engine()
    memory = successor.allocate(100, readable=True)
    remote = RemoteSegment(successor.address, memory.segment_id)
    pair.run(Transfer(Op.READ, pair.local, 0, remote, 0, 100))


def test_a_forgotten_peer_fails_its_batches_now(make_engine: Make, peer: PeerInProcess) -> None:
    to = WritesTo(make_engine(), peer)
    to.engine.submit([to.transfer], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    peer.stop()
    batches = [to.engine.submit([to.transfer], deadline_s=NEVER_S) for _ in range(3)]
    to.engine.forget(to.address)
    for batch in batches:
        with pytest.raises(PeerLost):
            batch.wait(PATIENCE_S)
    peer.resume()
    to.engine.submit([to.transfer], deadline_s=PATIENCE_S).wait(PATIENCE_S)  # and may be met again


def test_closing_the_engine_fails_what_is_under_way(make_engine: Make, peer: PeerInProcess) -> None:
    to = WritesTo(make_engine(), peer)
    peer.stop()
    batch = to.engine.submit([to.transfer], deadline_s=NEVER_S)
    to.engine.close()
    with pytest.raises(PeerLost):
        batch.wait(PATIENCE_S)
    with pytest.raises(InvalidRequest):
        to.engine.submit([to.transfer], deadline_s=NEVER_S)


def test_a_wrong_token_is_refused_by_both_sides(pair: Pair, make_engine: Make) -> None:
    stranger = make_engine(token="another token")
    local = stranger.allocate(100)
    batch = stranger.submit(
        [Transfer(Op.READ, local, 0, pair.remote, 0, 10)], deadline_s=PATIENCE_S
    )
    with pytest.raises(Unauthenticated):
        batch.wait(PATIENCE_S)
    assert bytes(local.buffer) == bytes(100)


def test_an_address_of_another_version_or_none_at_all_is_refused(pair: Pair) -> None:
    for address, error in (
        (pair.far.address.replace("ms2", "ms3", 1), Incompatible),
        ("ms2;id=zz;host=x", InvalidRequest),
        ("nonsense", InvalidRequest),
    ):
        remote = RemoteSegment(address, 1)
        with pytest.raises(error):
            pair.run(Transfer(Op.READ, pair.local, 0, remote, 0, 10))


def test_peers_without_a_common_transport_are_lost_to_each_other(
    pair: Pair, transport: str
) -> None:
    other = "tcp" if transport == "shm" else "shm"
    options = TransferOptions(transports=(other,))
    with TransferEngine(cluster_token="t", options=options) as stranger:
        remote = RemoteSegment(stranger.address, 1)
        with pytest.raises(PeerLost, match="common"):
            pair.run(Transfer(Op.READ, pair.local, 0, remote, 0, 10))


def test_ordered_faults_happen_and_then_stop(make_engine: Make) -> None:
    faults = FaultPlan(corrupt_writes=1, drop_connections=1)
    near, far = make_engine(faults=faults), make_engine()
    memory = far.allocate(100)
    window_id = far.open_window(memory, [(0, 100)])
    local = near.allocate(100)
    local.buffer[:] = b"g" * 100
    remote = RemoteSegment(far.address, memory.segment_id)
    write = Transfer(Op.WRITE, local, 0, remote, 0, 100, window_id)
    with pytest.raises(PeerLost, match="fault"):
        near.submit([write], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    near.submit([write], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    assert sum(a != b for a, b in zip(memory.buffer, local.buffer, strict=True)) == 1
    near.submit([write], deadline_s=PATIENCE_S).wait(PATIENCE_S)
    assert memory.buffer == local.buffer == b"g" * 100
