"""Engines of one host: which way the bytes take, and what they do when it is not open to them."""

from __future__ import annotations

import pytest

from protocol.errors import IntegrityError, InvalidRequest, PeerLost
from tests.patience import NEVER_S, PATIENCE_S
from tests.transfer.conftest import Make, MakePair, Pair, PeerInProcess, run
from transfer import Op, RemoteSegment, Transfer
from transfer.native import address_of, data_plane
from transfer.scatter import Rows
from transfer.shm import session
from transfer.shm.memfd import PeerMemory
from transfer.shm.sources import OtherProcess
from transfer.tcp.session import StreamSession

TRANSPORTS = ["shm"]

MIB = 1 << 20


@pytest.fixture
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte may travel on the connection."""

    def refuse(*_: object) -> None:
        raise AssertionError("payload on the connection")

    monkeypatch.setattr(StreamSession, "receive_payload", refuse)
    monkeypatch.setattr(StreamSession, "_ask_write", refuse)


@pytest.fixture
def not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a kernel or container that lets nobody read another process."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(OtherProcess, "read", refuse)


def read(pair: Pair) -> None:
    """All of it, in this thread where that can be."""
    pair.near.run([pair.read(0, 0, pair.memory.nbytes)], deadline_s=PATIENCE_S)


def round_trip(pair: Pair) -> None:
    content = bytes(pair.memory.buffer)
    read(pair)
    assert pair.local.buffer == content
    pair.local.buffer[:] = content[::-1]
    pair.run(pair.write(0, 0, pair.memory.nbytes))
    assert pair.memory.buffer == content[::-1]


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("nbytes", [1000, 3 * MIB])
@pytest.mark.parametrize("registered", [False, True])
def test_memory_of_the_host_does_not_travel_on_the_connection(
    make_pair: MakePair, registered: bool, nbytes: int, checksums: bool, request: pytest.FixtureRequest
) -> None:
    pair = make_pair(nbytes, registered=registered, checksums=checksums)
    if registered:
        round_trip(pair)  # the first WRITE travels, while the peer is asked whether it may read by address
    request.getfixturevalue("no_stream")
    round_trip(pair)
    round_trip(pair)


@pytest.mark.usefixtures("not_permitted")
@pytest.mark.parametrize("checksums", [False, True])
def test_where_reading_processes_is_forbidden_the_connection_carries_the_bytes(
    make_pair: MakePair, checksums: bool
) -> None:
    pair = make_pair(3 * MIB, registered=True, checksums=checksums)
    round_trip(pair)
    round_trip(pair)


@pytest.mark.usefixtures("not_permitted")
def test_offers_under_way_while_both_ends_send_much_block_nobody(make_engine: Make) -> None:
    near, far = make_engine(), make_engine()
    size = 8 * MIB
    source = far.register(bytearray(size), readable=True)
    into = far.allocate(64 * MIB)
    window_id = far.open_window(into, [(0, into.nbytes)])
    transfers = []
    for i in range(4):
        landing, brought, offered = near.allocate(size), near.register(bytearray(size)), near.allocate(size)
        offered.buffer[:] = bytes([i]) * size
        read = Transfer(Op.READ, landing, 0, RemoteSegment(far.address, source.segment_id), 0, size)
        to = RemoteSegment(far.address, into.segment_id)
        transfers += [
            read,
            Transfer(Op.WRITE, brought, 0, to, 2 * i * size, size, window_id),
            Transfer(Op.WRITE, offered, 0, to, (2 * i + 1) * size, size, window_id),
        ]
    near.submit(transfers, deadline_s=NEVER_S).wait(PATIENCE_S)
    for i in range(4):
        assert into.buffer[(2 * i + 1) * size :][:size] == bytes([i]) * size


def test_a_copy_gone_wrong_is_never_a_success(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(3 * MIB)
    round_trip(pair)

    def wrong(self: PeerMemory, to: int, rows: Rows, *, to_column: int) -> bool:
        self.copy(to, rows, to_column=to_column)
        for segment in (pair.local, pair.memory):
            if to == segment.base:
                segment.buffer[0] ^= 1
        return data_plane().rows_equal(to, address_of(self.view), rows, column=to_column)

    monkeypatch.setattr(PeerMemory, "copy_verified", wrong)
    for transfer in (pair.read(0, 0, 3 * MIB), pair.write(0, 0, 3 * MIB)):
        with pytest.raises(IntegrityError):
            pair.run(transfer)
    monkeypatch.undo()
    round_trip(pair)


@pytest.mark.parametrize("registered", [False, True])
def test_a_small_read_needs_no_thread_and_no_word_from_the_peer(
    make_pair: MakePair, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(64 << 10, registered=registered)
    read(pair)  # maps it
    with monkeypatch.context() as patch:
        patch.setattr(session.ShmSession, "carry", None)
        pair.memory.buffer[:] = b"n" * pair.memory.nbytes
        read(pair)
    assert pair.local.buffer == b"n" * pair.memory.nbytes
    pair.far.close_window(pair.window_id)
    pair.far.deregister(pair.memory)
    with pytest.raises(InvalidRequest):
        read(pair)


def test_mapped_memory_is_the_peers_itself_and_only_what_is_lent(make_pair: MakePair) -> None:
    pair = make_pair(2 * MIB)
    view = pair.near.map(pair.remote, 100, MIB)
    assert view.readonly
    assert view == pair.memory.buffer[100 : 100 + MIB]
    for offset, length in [(-1, 5), (0, -1), (2 * MIB, 1), (5, 2 * MIB), (1 << 62, 1)]:
        with pytest.raises(InvalidRequest):
            pair.near.map(pair.remote, offset, length)
    for options in ({}, {"readable": True}):
        other = pair.far.allocate(4096, **options)
        remote = RemoteSegment(pair.far.address, other.segment_id)
        if options:
            pair.near.map(remote, 0, 10)
            pair.far.deregister(other)
        with pytest.raises(InvalidRequest):
            pair.near.map(remote, 0, 1)
    read(pair)
    pair.near.close()
    pair.memory.buffer[100] ^= 0xFF
    assert view == pair.memory.buffer[100 : 100 + MIB]


@pytest.mark.parametrize(("transport", "registered"), [("shm", True), ("tcp", False)])
def test_memory_that_was_registered_or_is_another_hosts_cannot_be_mapped(make_pair: MakePair, registered: bool) -> None:
    pair = make_pair(MIB, registered=registered)
    with pytest.raises(InvalidRequest):
        pair.near.map(pair.remote, 0, 1)
    read(pair)


def test_another_process_reads_and_writes_memory_that_was_registered(make_engine: Make, peer: PeerInProcess) -> None:
    engine = make_engine()
    remote, window_id = peer.lend(4 * MIB, 7)
    local = engine.register(bytearray(4 * MIB))
    for fill in (b"r", b"s"):
        local.buffer[:] = fill * (4 * MIB)
        run(engine, Transfer(Op.WRITE, local, 0, remote, 0, 4 * MIB, window_id))
        assert peer.content(remote) == fill * (4 * MIB)
    local.buffer[:] = bytes(4 * MIB)
    engine.run([Transfer(Op.READ, local, 0, remote, 0, 4 * MIB)], deadline_s=PATIENCE_S)
    assert local.buffer == b"s" * (4 * MIB)


def test_a_peer_that_was_killed_is_noticed_though_its_memory_could_still_be_read(
    make_engine: Make, peer: PeerInProcess
) -> None:
    engine = make_engine()
    remote, _ = peer.lend(MIB, 7)
    read = Transfer(Op.READ, engine.allocate(MIB), 0, remote, 0, MIB)
    engine.run([read], deadline_s=PATIENCE_S)
    peer.end()
    with pytest.raises(PeerLost):
        run(engine, read)
