"""Failures between a session, its target and their RDMA devices; invalid control messages; missing dependencies."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError, IntegrityError, InvalidRequest, PeerLost, StaleLease
from tests.patience import NEVER_S, PATIENCE_S
from tests.transfer.conftest import MakePair, Pair
from tests.transfer.fake_fabric import LIMITS, PORT, FakeDevice, FakePair, Request, Wire
from transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions, registry
from transfer.rdma import control, verbs
from transfer.rdma.control import PAIR_BYTES, RemoteKey
from transfer.rdma.fabric import CHAIN
from transfer.rdma.queues import SendQueue, Work, runs_of
from transfer.rdma.rail import RegisteredMemory
from transfer.rdma.transport import RdmaTransport
from transfer.scatter import rows
from transfer.segments import SegmentTable
from transfer.stats import Incident
from transfer.tcp.frames import HEADER_BYTES, Code, Kind, ProtocolViolation, decode

TRANSPORTS = ["rdma"]


@pytest.fixture(params=[True, False], ids=["checksums", "bare"])
def checksums(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def pair(wire: Wire, make_pair: MakePair, checksums: bool) -> Pair:
    pair = make_pair(checksums=checksums)
    pair.local.buffer[:] = b"n" * (1 << 20)
    pair.memory.buffer[:] = b"f" * (1 << 20)
    return pair


def test_closing_a_window_ends_a_write_that_hangs_and_nothing_is_stored_later(pair: Pair, wire: Wire) -> None:
    wire.freeze()
    batch = pair.near.submit([pair.write(0, 0, 1 << 20)], deadline_s=PATIENCE_S)
    assert wire.has_frozen.wait(PATIENCE_S)
    pair.far.close_window(pair.window_id)  # returns although the WRITE is still frozen
    wire.thaw()
    with pytest.raises(StaleLease):
        batch.wait(PATIENCE_S)
    assert pair.memory.buffer == b"f" * (1 << 20)


@pytest.mark.parametrize("deadline_s", [0.3, NEVER_S])
def test_a_read_that_hangs_ends_with_its_deadline_or_its_forgotten_peer_and_fills_nothing_later(
    pair: Pair, wire: Wire, deadline_s: float
) -> None:
    wire.freeze()
    batch = pair.near.submit([pair.read(0, 0, 1 << 20)], deadline_s=deadline_s)
    if deadline_s == NEVER_S:
        assert wire.has_frozen.wait(PATIENCE_S)
        pair.near.forget(pair.far.address)
    with pytest.raises(PeerLost):
        batch.wait(PATIENCE_S)
    wire.thaw()
    assert pair.local.buffer == b"n" * (1 << 20)


def test_a_failed_queue_pair_is_replaced_and_the_batch_succeeds(pair: Pair, wire: Wire) -> None:
    pair.run(pair.read(0, 0, 4096))
    for queue_pair in list(wire.pairs.values()):
        queue_pair.fail()
    pair.local.buffer[:] = b"n" * (1 << 20)
    pair.run(pair.read(0, 0, 1 << 20), pair.write(0, 0, 0))
    assert pair.local.buffer == b"f" * (1 << 20)


def test_a_key_that_was_told_dies_with_its_segment(pair: Pair, wire: Wire) -> None:
    other = pair.far.allocate(4096, readable=True)
    pair.run(pair.read(0, 0, 4096))
    pair.far.close_window(pair.window_id)
    pair.far.deregister(pair.memory)
    assert len(wire.regions) == 2  # near's memory and the other segment of far
    with pytest.raises(InvalidRequest):
        pair.run(pair.read(0, 0, 4096))
    remote = RemoteSegment(pair.far.address, other.segment_id)
    pair.run(Transfer(Op.READ, pair.local, 0, remote, 0, 4096))
    assert pair.local.buffer[:4096] == bytes(4096)


def test_deregistering_waits_for_no_reader_that_hangs(pair: Pair, wire: Wire) -> None:
    pair.far.close_window(pair.window_id)
    wire.freeze()
    batch = pair.near.submit([pair.read(0, 0, 4096)], deadline_s=PATIENCE_S)
    assert wire.has_frozen.wait(PATIENCE_S)
    pair.far.deregister(pair.memory)
    wire.thaw()
    with pytest.raises(InvalidRequest):
        batch.wait(PATIENCE_S)


@pytest.mark.parametrize("checksums", [True])
@pytest.mark.parametrize("nbytes", [1, 1 << 20])
def test_a_slice_that_is_damaged_on_the_way_is_sent_again(pair: Pair, wire: Wire, nbytes: int) -> None:
    wire.num_to_damage = 1
    pair.run(pair.write(0, 0, nbytes))
    assert not wire.num_to_damage
    assert pair.memory.buffer[:nbytes] == pair.local.buffer[:nbytes]
    assert sum(stats.incidents[Incident.CORRUPT] for stats in pair.near.stats) == 1


class Told:
    """Connection that ends at once. `on_end` is called meanwhile."""

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self.end = on_end


@pytest.mark.parametrize("access", ["readable", "writable"])
def test_a_connection_that_found_a_segment_before_its_removal_is_told_no_key_of_it(wire: Wire, access: str) -> None:
    """The keys still exist while the removal waits for the connections that received them."""
    memory, segment = RegisteredMemory(FakeDevice(wire, PORT)), SegmentTable().allocate(4096, readable=True)
    ask = getattr(memory, access)
    refused: list[InvalidRequest] = []

    def ask_late() -> None:
        with pytest.raises(InvalidRequest) as caught:
            ask(segment, Told())
        refused.append(caught.value)

    ask(segment, Told(ask_late))
    memory.remove(segment)
    ask_late()
    assert len(refused) == 2
    assert not memory._told


# Control messages


@given(bit=st.integers(0, 8 * control.KEY_BYTES - 1))
def test_a_key_with_a_flipped_bit_is_not_believed(bit: int) -> None:
    frame = bytearray(control.key_reply(RemoteKey(1, 2, 3)))
    frame[HEADER_BYTES + bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolViolation):
        control.unpack_key(decode(frame[:HEADER_BYTES]), frame[HEADER_BYTES:])


@given(data=st.binary(min_size=PAIR_BYTES, max_size=PAIR_BYTES))
def test_what_is_no_queue_pair_is_refused(data: bytes) -> None:
    try:
        (pair,) = control.unpack_pairs(data, LIMITS)
    except ProtocolViolation:
        return
    assert pair.number < 1 << 24
    assert 1 <= pair.path_mtu <= LIMITS.path_mtu
    assert pair.max_outstanding_reads <= LIMITS.max_outstanding_reads


def test_a_grant_ends_well_or_with_words() -> None:
    assert decode(control.result(5, None)) == (Kind.RESULT, Code.OK, 0, 0, 0, 5, 0, 0)
    frame = control.result(5, IntegrityError("bad"))
    assert decode(frame[:HEADER_BYTES]).code is Code.CORRUPT
    assert frame[HEADER_BYTES:] == b"bad"


def queue_of(depth: int) -> tuple[SendQueue[int], deque[tuple[FakePair, Request]]]:
    """Returns a send queue and the requests it has posted, none of which completes by itself."""
    wire, posted = Wire(), deque[tuple[FakePair, Request]]()
    wire.frozen = posted
    pair = wire.open(PORT).make_queue_pair(None, send_depth=depth, receive_depth=1, serves=False)
    return SendQueue(pair, 1, depth), posted


def work(owner: int, count: int) -> Work[int]:
    return Work(owner, Op.READ, [(i, i, 1) for i in range(count)], 1, 2)


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=10), depth=st.integers(1, 4 * CHAIN))
def test_works_end_in_order_and_the_queue_is_never_overfull(sizes: list[int], depth: int) -> None:
    queue, posted = queue_of(depth)
    for owner, size in enumerate(sizes):
        queue.submit(work(owner, size))
    ended, freed, done = [], 0, 0
    while done < len(posted):
        assert sum(len(request.runs) for _, request in posted) - freed <= depth
        freed += len(posted[done][1].runs)
        done += 1
        if (finished := queue.completed()) is not None:
            ended.append(finished.owner)
    assert ended == list(range(len(sizes)))
    assert freed == sum(sizes)


def test_what_was_given_up_is_posted_no_more() -> None:
    queue, posted = queue_of(1)
    queue.submit(work(0, 3))
    assert queue.give_up() == 1
    queue.completed()
    assert len(posted) == 1


def test_runs_are_absolute_without_the_empty_ones_and_no_longer_than_a_message() -> None:
    runs = runs_of(rows((0, 100, 10), (50, 0, 0), (20, 200, 25)), 1000, 5000, 10)
    assert [tuple(run) for run in runs] == [(1000, 5100, 10), (1020, 5200, 10), (1030, 5210, 10), (1040, 5220, 5)]
    assert runs_of(np.empty((0, 3), dtype=np.int64), 0, 0, 10) == []


def test_without_pyverbs_rdma_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    monkeypatch.setattr(registry, "_TRANSPORTS", {"rdma": RdmaTransport})
    verbs.pyverbs.cache_clear()  # a failed import is not cached, so later tests import again
    engine = TransferEngine(cluster_token="t", options=TransferOptions(transports=("rdma",)))
    with pytest.raises(ConfigError, match=r"python3-pyverbs.*moonserve\[rdma\]"):
        engine.start()


def test_the_root_logger_is_left_as_it_was() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    with verbs.root_logger_untouched():
        root.addHandler(logging.NullHandler())
        root.setLevel(logging.DEBUG)
    assert (root.handlers, root.level) == before
