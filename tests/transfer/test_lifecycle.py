"""What is taken is given back: threads, descriptors, memory."""

from __future__ import annotations

import gc
import os
import socket
import threading
import weakref
from collections.abc import Callable

import pytest

from protocol.errors import ConfigError, InvalidRequest, PeerLost
from tests.patience import NEVER_S, PATIENCE_S
from tests.transfer.conftest import TOKEN, Pair, PeerInProcess
from transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from transfer.address import parse


def census() -> tuple[int, int]:
    gc.collect()  # other tests' leavings are not counted
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def engine_of(*transports: str) -> TransferEngine:
    return TransferEngine(cluster_token=TOKEN, options=TransferOptions(transports=transports))


def test_nothing_is_left_after_two_hundred_cycles(transport: str) -> None:
    def cycle() -> None:
        with (
            engine_of(transport) as near,
            engine_of(transport) as far,
        ):
            memory = far.allocate(4096, readable=True)
            local = near.allocate(4096)
            window_id = far.open_window(memory, [(0, 4096)])
            remote = RemoteSegment(far.address, memory.segment_id)
            read = Transfer(Op.READ, local, 0, remote, 0, 4096)
            write = Transfer(Op.WRITE, local, 0, remote, 0, 4096, window_id)
            near.submit([read, write], deadline_s=PATIENCE_S).wait(PATIENCE_S)

    cycle()
    before = census()
    for _ in range(200):
        cycle()
    # Without waiting for the garbage collector: memory goes when it is let go.
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_lost_peers_leave_nothing_behind(pair: Pair, make_engine: Callable[..., object]) -> None:
    pair.run(pair.read(0, 0, 10))
    before = census()
    for _ in range(10):
        with engine_of(*parse(pair.far.address).rails) as other:
            memory = other.allocate(4096, readable=True)
            remote = RemoteSegment(other.address, memory.segment_id)
            pair.run(Transfer(Op.READ, pair.local, 0, remote, 0, 10))
        with pytest.raises(PeerLost):
            pair.run(Transfer(Op.READ, pair.local, 0, remote, 0, 10))
        pair.near.forget(remote.address)
        for peer in pair.near._peers.leaving:
            peer.join()
    del memory, other
    assert census() == before


def test_an_idle_peer_that_is_gone_costs_no_thread(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.lane.IDLE_S", 0.01)
    pair.run(pair.read(0, 0, 10))
    (peer,) = pair.near._peers.met.values()
    (lane,) = peer._lanes.values()
    assert lane.running
    pair.far.close()
    lane.join()
    assert peer.idle
    with pytest.raises(PeerLost):
        pair.run(pair.read(0, 0, 10))


def test_a_failed_batch_keeps_no_memory_alive(pair: Pair) -> None:
    local = pair.near.allocate(4096)
    batch = pair.near.submit(
        [Transfer(Op.READ, local, 0, RemoteSegment(pair.far.address, 999), 0, 10)],
        deadline_s=PATIENCE_S,
    )
    with pytest.raises(InvalidRequest):
        batch.wait(PATIENCE_S)
    (error,) = batch.errors
    del batch
    gone = weakref.ref(local.memory)
    pair.near.deregister(local)
    del local
    pair.run(pair.read(0, 0, 10))  # by now the peer's thread has left the first batch
    assert error is not None
    assert gone() is None


def test_a_segment_in_use_cannot_be_deregistered(
    make_engine: Callable[..., TransferEngine], peer: PeerInProcess
) -> None:
    engine = make_engine()
    address, segment_id = peer.ask("address"), peer.ask("allocate", 4096, 0, True)
    local = engine.allocate(4096)
    peer.stop()
    read = Transfer(Op.READ, local, 0, RemoteSegment(address, segment_id), 0, 10)
    batch = engine.submit([read], deadline_s=PATIENCE_S)
    with pytest.raises(InvalidRequest, match="in use"):
        engine.deregister(local)
    peer.resume()
    batch.wait(PATIENCE_S)
    engine.deregister(local)
    with pytest.raises(InvalidRequest, match="not registered"):
        engine.deregister(local)
    with pytest.raises(InvalidRequest, match="not registered"):
        engine.submit([read], deadline_s=1)


def test_a_segment_with_an_open_window_cannot_be_deregistered(pair: Pair) -> None:
    with pytest.raises(InvalidRequest, match="in use"):
        pair.far.deregister(pair.memory)
    pair.far.close_window(pair.window_id)
    pair.far.close_window(pair.window_id)
    pair.far.deregister(pair.memory)


def test_peers_cannot_read_what_was_deregistered(pair: Pair) -> None:
    pair.run(pair.read(0, 0, 10))
    pair.far.close_window(pair.window_id)
    pair.far.deregister(pair.memory)
    with pytest.raises(InvalidRequest):
        pair.run(pair.read(0, 0, 10))
    with pytest.raises(InvalidRequest):
        pair.run(pair.read(0, 0, 10))


def test_a_source_that_was_deregistered_and_one_that_replaced_it_are_told_apart(
    pair: Pair,
) -> None:
    for fill in (b"a", b"b", b"c"):
        local = pair.near.allocate(4096)
        local.buffer[:] = fill * 4096
        pair.run(Transfer(Op.WRITE, local, 0, pair.remote, 0, 4096, pair.window_id))
        assert pair.memory.buffer[:4096] == fill * 4096
        pair.near.deregister(local)


def test_closing_twice_is_harmless_and_views_outlive_the_engine(pair: Pair) -> None:
    view = pair.memory.buffer
    pair.far.close()
    pair.far.close()
    view[0] = 1
    assert view[0] == 1


@pytest.mark.parametrize(
    ("token", "host", "transports"),
    [
        ("", "127.0.0.1", ("tcp",)),
        ("t", "127.0.0.1", ()),
        ("t", "127.0.0.1", ("tcp", "carrier-pigeon")),
        ("t", "127.0.0.1", ("tcp", "tcp")),
        ("t", "0.0.0.0", ("tcp",)),
        ("t", "203.0.113.1", ("shm", "tcp")),
    ],
)
def test_what_cannot_be_started_says_so(token: str, host: str, transports: tuple[str, ...]) -> None:
    before = census()

    def start() -> None:
        options = TransferOptions(host=host, transports=transports)
        TransferEngine(cluster_token=token, options=options).start()

    with pytest.raises(ConfigError):
        start()
    assert census() == before


def test_memory_that_cannot_be_registered_is_refused(pair: Pair) -> None:
    for buffer in (b"read-only", bytearray(), memoryview(bytearray(10))[::2]):
        with pytest.raises(InvalidRequest):
            pair.near.register(buffer)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        pair.near.allocate(0)


def test_the_first_transport_that_gets_through_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.job._CONNECT_S", NEVER_S)  # the first one may be slow
    with (
        engine_of("shm", "tcp") as near,
        engine_of("tcp", "shm") as far,
    ):
        memory = far.allocate(100, readable=True)
        memory.buffer[:] = b"m" * 100
        address = parse(far.address)
        # An abstract name in another network namespace looks like this: same host, nobody there.
        unreachable = far.address.replace(address.rails["shm"][0].endpoint, "moonserve-elsewhere")
        other_host = far.address.replace(address.host, "another-boot")
        for where, expected in (
            (far.address, "shm"),
            (unreachable, "tcp"),
            (other_host, "tcp"),
        ):
            local = near.allocate(100)
            remote = RemoteSegment(where, memory.segment_id)
            near.submit([Transfer(Op.READ, local, 0, remote, 0, 100)], deadline_s=PATIENCE_S).wait(
                PATIENCE_S
            )
            assert local.buffer == memory.buffer
            paths = near._peers.met[where]._lanes
            assert [path.transport for path, lane in paths.items() if lane.connected] == [expected]


def test_idle_engines_use_no_processor_time(pair: Pair) -> None:
    pair.run(pair.read(0, 0, 10))
    before = sum(os.times()[:2])
    threading.Event().wait(0.3)
    assert sum(os.times()[:2]) - before < 0.1


def test_the_listening_socket_is_gone_after_close(pair: Pair, transport: str) -> None:
    endpoint = parse(pair.far.address).rails[transport][0].endpoint
    pair.far.close()
    if transport == "tcp":
        family, where = socket.AF_INET, ("127.0.0.1", int(endpoint.rpartition(":")[2]))
    else:
        family, where = socket.AF_UNIX, "\0" + endpoint
    with socket.socket(family) as sock, pytest.raises(ConnectionRefusedError):
        sock.connect(where)
