"""Engines of one host: which way the bytes take, and what they do when it is not open to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from protocol.errors import IntegrityError, InvalidRequest
from tests.patience import NEVER_S, PATIENCE_S
from tests.transfer.conftest import TOKEN, PeerInProcess
from transfer import Op, RemoteSegment, Segment, Transfer, TransferEngine, TransferOptions
from transfer.native import address_of, data_plane
from transfer.native.process_memory import OtherProcess
from transfer.rows import Rows
from transfer.shm import session
from transfer.shm.memfd import PeerMemory
from transfer.wire.stream import StreamSession

MIB = 1 << 20
Make = Callable[..., TransferEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    engines: list[TransferEngine] = []

    def start(**options: object) -> TransferEngine:
        chosen = TransferOptions(transports=("shm",), **options)  # type: ignore[arg-type]
        engine = TransferEngine(cluster_token=TOKEN, options=chosen)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def transport() -> str:
    return "shm"


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


class Two:
    """`near` reads from and writes to `far`; each side's memory is allocated or brought by the caller."""

    def __init__(self, make: Make, nbytes: int, *, registered: bool, **options: object) -> None:
        self.near, self.far = make(**options), make(**options)
        self.nbytes = nbytes
        self.local = self._memory(self.near, registered)
        self.memory = self._memory(self.far, registered)
        self.memory.buffer[:] = random.Random(0).randbytes(nbytes)
        self.remote = RemoteSegment(self.far.address, self.memory.segment_id)
        self.window_id = self.far.open_window(self.memory, [(0, nbytes)])

    def _memory(self, engine: TransferEngine, registered: bool) -> Segment:
        if registered:
            return engine.register(bytearray(self.nbytes), readable=True)
        return engine.allocate(self.nbytes, readable=True)

    def read(self) -> None:
        self.near.run(
            [Transfer(Op.READ, self.local, 0, self.remote, 0, self.nbytes)], deadline_s=PATIENCE_S
        )

    def write(self) -> None:
        transfer = Transfer(
            Op.WRITE, self.local, 0, self.remote, 0, self.nbytes, window_id=self.window_id
        )
        self.near.submit([transfer], deadline_s=PATIENCE_S).wait(PATIENCE_S)

    def round_trip(self) -> None:
        content = bytes(self.memory.buffer)
        self.read()
        assert self.local.buffer == content
        self.local.buffer[:] = content[::-1]
        self.write()
        assert self.memory.buffer == content[::-1]


@pytest.mark.usefixtures("no_stream")
@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("nbytes", [1000, 3 * MIB])
def test_allocated_memory_never_travels_on_the_connection(
    make: Make, nbytes: int, checksums: bool
) -> None:
    two = Two(make, nbytes, registered=False, checksums=checksums)
    two.round_trip()
    two.round_trip()


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("nbytes", [1000, 3 * MIB])
def test_registered_memory_is_read_by_address_once_both_know_that_they_may(
    make: Make, nbytes: int, checksums: bool, request: pytest.FixtureRequest
) -> None:
    two = Two(make, nbytes, registered=True, checksums=checksums)
    two.round_trip()  # the first WRITE travels, while the peer is asked
    request.getfixturevalue("no_stream")
    two.round_trip()


@pytest.mark.usefixtures("not_permitted")
@pytest.mark.parametrize("checksums", [False, True])
def test_where_reading_processes_is_forbidden_the_connection_carries_the_bytes(
    make: Make, checksums: bool
) -> None:
    two = Two(make, 3 * MIB, registered=True, checksums=checksums)
    two.round_trip()
    two.round_trip()


@pytest.mark.usefixtures("not_permitted")
def test_offers_under_way_while_both_ends_send_much_block_nobody(make: Make) -> None:
    near, far = make(), make()
    size = 8 * MIB
    source = far.register(bytearray(size), readable=True)
    into = far.allocate(64 * MIB)
    window_id = far.open_window(into, [(0, into.nbytes)])
    transfers = []
    for i in range(4):
        landing, brought, offered = (
            near.allocate(size),
            near.register(bytearray(size)),
            near.allocate(size),
        )
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


def test_a_large_copy_is_shared_by_the_threads_that_the_options_grant(make: Make) -> None:
    two = Two(make, 20 * MIB, registered=False, copy_threads=3)
    two.round_trip()


def test_a_copy_gone_wrong_is_never_a_success(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(make, 3 * MIB, registered=False, checksums=True)
    two.round_trip()

    def wrong(self: PeerMemory, to: int, rows: Rows, *, to_column: int) -> bool:
        self.copy(to, rows, to_column=to_column)
        for segment in (two.local, two.memory):
            if to == segment.base:
                segment.buffer[0] ^= 1
        return data_plane().rows_equal(to, address_of(self.view), rows, column=to_column)

    monkeypatch.setattr(PeerMemory, "copy_verified", wrong)
    for attempt in (two.read, two.write):
        with pytest.raises(IntegrityError):
            attempt()
    monkeypatch.undo()
    two.round_trip()


def test_a_small_read_needs_no_thread_and_no_word_from_the_peer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for registered in (False, True):
        two = Two(make, 64 << 10, registered=registered)
        two.read()  # maps it
        with monkeypatch.context() as patch:
            patch.setattr(session.ShmSession, "carry", None)
            two.memory.buffer[:] = b"n" * two.nbytes
            two.read()
        assert two.local.buffer == b"n" * two.nbytes
        two.far.close_window(two.window_id)
        two.far.deregister(two.memory)
        with pytest.raises(InvalidRequest):
            two.read()


def test_a_view_is_the_peers_memory_itself(make: Make) -> None:
    two = Two(make, 2 * MIB, registered=False)
    with two.near.view(two.remote, 100, MIB) as view:
        assert view.readonly
        assert view == two.memory.buffer[100 : 100 + MIB]
        two.memory.buffer[100] ^= 0xFF
        assert view[0] == two.memory.buffer[100]
        two.near.close()
        assert view == two.memory.buffer[100 : 100 + MIB]


@pytest.mark.parametrize(("offset", "length"), [(-1, 5), (0, -1), (MIB, 1), (5, MIB), (1 << 62, 1)])
def test_a_view_stays_within_its_segment(make: Make, offset: int, length: int) -> None:
    two = Two(make, MIB, registered=False)
    with pytest.raises(InvalidRequest), two.near.view(two.remote, offset, length):
        pass
    two.read()


def test_only_memory_that_is_lent_can_be_viewed(make: Make) -> None:
    two = Two(make, MIB, registered=True)
    with pytest.raises(InvalidRequest), two.near.view(two.remote, 0, 1):
        pass
    secret = two.far.allocate(4096)
    hidden = RemoteSegment(two.far.address, secret.segment_id)
    with pytest.raises(InvalidRequest), two.near.view(hidden, 0, 1):
        pass
    gone = two.far.allocate(4096, readable=True)
    remote = RemoteSegment(two.far.address, gone.segment_id)
    with two.near.view(remote, 0, 10):
        pass
    two.far.deregister(gone)
    with pytest.raises(InvalidRequest), two.near.view(remote, 0, 1):
        pass
    two.read()


def test_another_process_reads_and_writes_memory_that_was_registered(
    make: Make, peer: PeerInProcess
) -> None:
    engine = make()
    address, segment_id = peer.ask("address"), peer.ask("allocate", 4 * MIB, 7, True)
    window_id = peer.ask("open_window", segment_id, [(0, 4 * MIB)])
    remote = RemoteSegment(address, segment_id)
    local = engine.register(bytearray(b"r" * (4 * MIB)))
    write = Transfer(Op.WRITE, local, 0, remote, 0, 4 * MIB, window_id)
    for fill in (b"r", b"s"):
        local.buffer[:] = fill * (4 * MIB)
        engine.submit([write], deadline_s=PATIENCE_S).wait(PATIENCE_S)
        assert bytes.fromhex(peer.ask("content", segment_id)) == fill * (4 * MIB)
    engine.run([Transfer(Op.READ, local, 0, remote, 0, 4 * MIB)], deadline_s=PATIENCE_S)
    assert local.buffer == b"s" * (4 * MIB)


def test_a_peer_that_was_killed_is_noticed_though_its_memory_could_still_be_read(
    make: Make, peer: PeerInProcess
) -> None:
    engine = make()
    remote = RemoteSegment(peer.ask("address"), peer.ask("allocate", MIB, 7, True))
    local = engine.allocate(MIB)
    read = Transfer(Op.READ, local, 0, remote, 0, MIB)
    engine.run([read], deadline_s=PATIENCE_S)
    peer.end()
    with pytest.raises(Exception, match="peer"):
        engine.submit([read], deadline_s=PATIENCE_S).wait(PATIENCE_S)
