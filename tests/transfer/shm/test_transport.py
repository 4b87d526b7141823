"""Engines of one host: which path the bytes take, the fallback when it is not permitted, and peers that lie about the
memory they offer."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from moonserve.protocol.errors import IntegrityError, InvalidRequest, StaleLease
from moonserve.transfer import Op, RemoteSegment, Segment, Transfer, TransferEngine, TransferOptions
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import address_of, data_plane
from moonserve.transfer.memory.memfd import OwnedMemory, PeerMemory
from moonserve.transfer.memory.scatter import Rows
from moonserve.transfer.shm.peer_memory import PeerProcess
from moonserve.transfer.shm.session import ShmSession
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.tcp.frames import HEADER_BYTES, Code, Header, Kind, decode, encode, error_of, request
from tests.patience import NEVER_S, PATIENCE_S
from tests.transfer.conftest import TOKEN, Make, MakePair, Pair
from tests.transfer.stage import authenticated, until_closed

TRANSPORTS = ["shm"]

MIB = 1 << 20


@pytest.fixture
def no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if payload travels on the connection."""
    for carry in ("receive_payload", "queue_payload"):
        monkeypatch.setattr(Connection, carry, Mock(side_effect=AssertionError("payload on the connection")))


@pytest.fixture
def not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a kernel or container that forbids reading other processes."""
    monkeypatch.setattr(PeerProcess, "read", Mock(side_effect=PermissionError))


def read(pair: Pair) -> None:
    """Reads all memory, in the caller's thread if the transport can."""
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
def test_memory_within_the_host_is_not_sent_on_the_connection(
    make_pair: MakePair, registered: bool, nbytes: int, checksums: bool, request: pytest.FixtureRequest
) -> None:
    pair = make_pair(nbytes, registered=registered, checksums=checksums)
    if registered:
        round_trip(pair)  # the first WRITE travels while the peer checks whether it may read by address
    request.getfixturevalue("no_stream")
    round_trip(pair)
    round_trip(pair)


@pytest.mark.usefixtures("not_permitted")
@pytest.mark.parametrize("checksums", [False, True])
def test_the_connection_carries_bytes_where_process_reads_are_forbidden(make_pair: MakePair, checksums: bool) -> None:
    pair = make_pair(3 * MIB, registered=True, checksums=checksums)
    round_trip(pair)
    round_trip(pair)


@pytest.mark.usefixtures("not_permitted")
def test_offers_do_not_deadlock_while_both_ends_send(make_engine: Make) -> None:
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


def test_a_wrong_copy_is_an_integrity_error(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(3 * MIB)
    monkeypatch.setattr(ShmSession, "_ask_for_lease", lambda *_: False)
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
def test_a_small_read_needs_no_thread_and_no_reply(
    make_pair: MakePair, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(64 << 10, registered=registered)
    read(pair)  # maps the memory
    with monkeypatch.context() as patch:
        patch.setattr(ShmSession, "receive_reply", None)
        patch.setattr(pair.near, "_submit", None)
        pair.memory.buffer[:] = b"n" * pair.memory.nbytes
        read(pair)
    assert pair.local.buffer == b"n" * pair.memory.nbytes
    pair.far.close_window(pair.window_id)
    pair.far.deregister(pair.memory)
    with pytest.raises(InvalidRequest):
        read(pair)


def test_an_inline_read_holds_its_segment_and_leaves_what_fails_a_check_to_the_caller(pair: Pair) -> None:
    read(pair)
    (peer,) = pair.near._peers.by_address.values()
    assert (lane := peer.shm_lane) is not None
    end, limits, row = pair.memory.nbytes, (-1, 1 << 62, (1 << 63) - 1), scatter.pack(scatter.rows((0, 0, 1)))
    wrong = [*((at, 0, 1) for at in (end, *limits)), *((0, at, 1) for at in (end, *limits))]
    for bad in [*wrong, *((0, 0, length) for length in (0, end + 1, *limits))]:
        assert not lane.copy_inline(0, pair.memory.segment_id, pair.local, scatter.pack(scatter.rows(bad)), 1)
    assert lane.copy_inline(0, pair.memory.segment_id, pair.local, row, 1)
    assert not pair.local.num_users
    pair.near._state.segments.hold([pair.local])
    with pytest.raises(InvalidRequest, match="in use"):
        pair.near.deregister(pair.local)
    pair.near._state.segments.release([pair.local])
    pair.near.deregister(pair.local)
    assert not lane.copy_inline(0, pair.memory.segment_id, pair.local, row, 1)
    into = pair.near.allocate(4096)
    assert lane.copy_inline(0, pair.memory.segment_id, into, row, 1)
    pair.far.close()
    assert not lane.copy_inline(0, pair.memory.segment_id, into, row, 1)


def test_map_shows_the_peers_memory_within_its_bounds(make_pair: MakePair) -> None:
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
def test_registered_memory_and_memory_of_another_host_cannot_be_mapped(make_pair: MakePair, registered: bool) -> None:
    pair = make_pair(MIB, registered=registered)
    with pytest.raises(InvalidRequest):
        pair.near.map(pair.remote, 0, 1)
    read(pair)


NBYTES = 8192


class Target:
    """Engine with a window over all of its memory, and a raw connection to it."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self.segment: Segment = engine.allocate(NBYTES, readable=True)
        self.window_id = engine.open_window(self.segment, [(0, NBYTES)])
        self.connection: Connection = authenticated(engine.address)
        self.source = OwnedMemory(NBYTES)
        self.source.view[:] = b"s" * NBYTES

    def offer(self, fd: int | None, *, source_id: int = 1, nbytes: int = NBYTES, base: int = 0) -> None:
        header = Header(kind=Kind.OFFER, source_id=source_id, window_id=base, nbytes=nbytes)
        self.connection.send(encode(header), fd)

    def write(self, rows: Rows, *, source_id: int = 1) -> None:
        header = Header(
            kind=Kind.WRITE_FROM,
            entries=len(rows),
            segment_id=self.segment.segment_id,
            window_id=self.window_id,
            source_id=source_id,
        )
        self.connection.send(request(header, rows))
        reply = self.reply()
        if reply.code is not Code.OK:
            raise error_of(reply.code, self.connection.receive_bytes(reply.entries).decode())

    def reply(self) -> Header:
        return decode(self.connection.receive_bytes(HEADER_BYTES))


@pytest.fixture
def target() -> Iterator[Target]:
    options = TransferOptions(transports=("shm",))
    with TransferEngine(cluster_token=TOKEN, options=options) as engine:
        target = Target(engine)
        yield target
        target.connection.close()


OUTSIDE = [
    *[(0, NBYTES, 1), (0, -1, 5), (0, 1, NBYTES), (0, 1 << 62, 1), (0, (1 << 63) - 1, 1)],
    *[(NBYTES, 0, 1), (-1, 0, 2), (NBYTES - 1, 0, 2), ((1 << 63) - 1, 0, 1), (0, 0, -1), (1, 1, (1 << 63) - 1)],
]


@pytest.mark.parametrize("row", OUTSIDE)
def test_rows_outside_of_either_memory_are_refused(target: Target, row: tuple[int, int, int]) -> None:
    target.offer(target.source.fd)
    with pytest.raises(InvalidRequest, match="never offered"):
        target.write(scatter.rows((0, 0, 1)), source_id=77)
    for rows in (scatter.rows(row), scatter.rows((5, 0, 1), row)):
        with pytest.raises(InvalidRequest):
            target.write(rows)
    assert not any(target.segment.buffer)
    target.write(scatter.rows((3, 0, 2), (9, 1, 0), (1, 7, 1)))
    assert bytes(target.segment.buffer[:6]) == b"\0s\0ss\0"


def test_nothing_is_stored_for_a_closed_window_or_a_deregistered_source(target: Target) -> None:
    target.offer(target.source.fd)
    target.write(scatter.rows((0, 0, 1)))
    other = target.engine.open_window(target.segment, [(0, 1)])
    target.source.mark_dead()
    with pytest.raises(InvalidRequest, match="no longer registered"):
        target.write(scatter.rows((0, 0, 1)))
    target.engine.close_window(target.window_id)
    target.segment.buffer[0] = 0
    with pytest.raises(StaleLease):
        target.write(scatter.rows((0, 0, 1)))
    target.window_id, second = other, OwnedMemory(NBYTES)
    target.offer(second.fd, source_id=2)  # unmaps the first
    with pytest.raises(InvalidRequest, match="never offered"):
        target.write(scatter.rows((0, 0, 1)))
    assert not any(target.segment.buffer)


def test_no_store_follows_the_close_of_its_window(pair: Pair) -> None:
    pair.local.buffer[:] = b"x" * pair.local.nbytes
    for _ in range(20):
        writing = threading.Event()

        def write_until_refused(window_id: int, writing: threading.Event) -> None:
            with contextlib.suppress(StaleLease):
                while True:
                    pair.run_inline(pair.write(0, 0, pair.memory.nbytes, window_id))
                    writing.set()

        window_id = pair.far.open_window(pair.memory, [(0, pair.memory.nbytes)])
        writer = threading.Thread(target=write_until_refused, args=(window_id, writing))
        writer.start()
        assert writing.wait(PATIENCE_S)
        pair.far.close_window(window_id)
        pair.memory.buffer[:] = bytes(pair.memory.nbytes)
        writer.join()
        assert not any(pair.memory.buffer)


def test_an_invalid_offer_ends_the_connection(target: Target) -> None:
    fd, marker, loose = target.source.fd, OwnedMemory(1), os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 1 << 20)  # not sealed, so its owner could shrink it
    for offers in (
        [{"fd": fd}, {"fd": fd}],
        [{"fd": None}],
        *([{"fd": fd, "nbytes": nbytes}] for nbytes in (0, NBYTES + 1, (1 << 64) - 1)),
        [{"fd": loose}],
        *([{"fd": marker.fd, "base": base}] for base in ((1 << 64) - 1, 1 << 63)),
    ):
        stranger = Target(target.engine)
        for offer in offers:
            stranger.offer(**offer)  # type: ignore[arg-type]
        until_closed(stranger.connection)
    os.close(loose)


def test_memory_offered_by_address_is_read_after_it_was_found_readable(target: Target) -> None:
    content, marker = bytearray(b"p" * NBYTES), OwnedMemory(1)
    target.offer(marker.fd, base=address_of(content))
    assert target.reply().nbytes == 1
    target.write(scatter.rows((0, 0, 10)))
    assert target.segment.buffer[:10] == b"p" * 10
    target.offer(marker.fd, base=1 << 46, source_id=2)
    assert target.reply().nbytes == 0
    with pytest.raises(InvalidRequest, match="never offered"):
        target.write(scatter.rows((0, 0, 10)), source_id=2)
    marker.mark_dead()
    with pytest.raises(InvalidRequest, match="no longer registered"):
        target.write(scatter.rows((0, 0, 10)))


def test_unexpected_descriptors_are_closed(target: Target) -> None:
    target.offer(target.source.fd)
    target.write(scatter.rows((0, 0, 1)))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    header = encode(Header(kind=Kind.MAP, segment_id=999))
    for fd in [target.source.fd] * 5 + [None]:  # the reply to the last one comes after the others are closed
        target.connection.send(header, fd)
        target.connection.receive_bytes(target.reply().entries)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_connection_unmaps_its_memory(target: Target) -> None:
    target.offer(target.source.fd)
    target.write(scatter.rows((0, 0, 1)))
    gc.collect()  # drops the mappings of earlier tests
    maps = Path("/proc/self/maps").read_text().count("memfd:moonserve")
    [served] = target.engine._state.served._served.values()
    target.connection.close()
    assert served.ended.wait(PATIENCE_S)
    assert Path("/proc/self/maps").read_text().count("memfd:moonserve") == maps - 1
