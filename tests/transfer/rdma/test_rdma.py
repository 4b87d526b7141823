"""Failures between a session, its target and their RDMA devices; invalid control messages; missing dependencies."""

import logging
import sys
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.protocol.errors import ConfigError, IntegrityError, InvalidRequest, PeerLost, StaleLease
from moonserve.transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions
from moonserve.transfer import engine as transfer_engine
from moonserve.transfer.memory.scatter import rows
from moonserve.transfer.memory.segments import SegmentTable
from moonserve.transfer.paths.traffic_stats import Incident
from moonserve.transfer.rdma import control_messages, verbs
from moonserve.transfer.rdma.control_messages import PAIR_BYTES, RemoteKey
from moonserve.transfer.rdma.device import CHAIN
from moonserve.transfer.rdma.memory_regions import RegisteredMemory
from moonserve.transfer.rdma.queue_pairs import SendQueue, SliceWork, runs_of
from moonserve.transfer.rdma.transport import RdmaTransport
from moonserve.transfer.tcp.frames import HEADER_BYTES, Code, Kind, ProtocolViolation, decode
from tests.patience import NEVER_S, PATIENCE_S
from tests.transfer.conftest import MakePair, Pair
from tests.transfer.rdma.fake_fabric import LIMITS, PORT, FakeDevice, FakePair, Request, Wire

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


def test_closing_a_window_ends_a_hanging_write_and_nothing_is_stored_later(pair: Pair, wire: Wire) -> None:
    wire.freeze()
    batch = pair.near.submit([pair.write(0, 0, 1 << 20)], deadline_s=PATIENCE_S)
    assert wire.has_frozen.wait(PATIENCE_S)
    pair.far.close_window(pair.window_id)  # returns although the WRITE is still frozen
    wire.thaw()
    with pytest.raises(StaleLease):
        batch.wait(PATIENCE_S)
    assert pair.memory.buffer == b"f" * (1 << 20)


@pytest.mark.parametrize("deadline_s", [0.3, NEVER_S])
def test_a_hanging_read_ends_at_the_deadline_or_forget_and_stores_nothing_later(
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


def test_a_key_becomes_invalid_with_its_segment(pair: Pair, wire: Wire) -> None:
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


def test_deregistering_does_not_wait_for_a_hanging_reader(pair: Pair, wire: Wire) -> None:
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
def test_a_corrupt_slice_is_sent_again(pair: Pair, wire: Wire, nbytes: int) -> None:
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
def test_a_removed_segment_gives_no_key_to_a_connection_that_found_it_earlier(wire: Wire, access: str) -> None:
    """The keys still exist while the removal waits for the connections that received them."""
    memory = RegisteredMemory(FakeDevice(wire, PORT))
    segment, ask = SegmentTable().add(memoryview(bytearray(4096)), readable=True), getattr(memory, access)
    refused: list[InvalidRequest] = []

    def ask_late() -> None:
        with pytest.raises(InvalidRequest) as caught:
            ask(segment, Told())
        refused.append(caught.value)

    ask(segment, Told(ask_late))
    memory.remove(segment)
    ask_late()
    assert len(refused) == 2
    assert not memory._holders


@given(bit=st.integers(0, 8 * control_messages.KEY_BYTES - 1))
def test_a_key_with_a_flipped_bit_is_rejected(bit: int) -> None:
    frame = bytearray(control_messages.key_reply(RemoteKey(1, 2, 3)))
    frame[HEADER_BYTES + bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolViolation):
        control_messages.unpack_key(decode(frame[:HEADER_BYTES]), frame[HEADER_BYTES:])


@given(data=st.binary(min_size=PAIR_BYTES, max_size=PAIR_BYTES))
def test_an_invalid_queue_pair_address_is_refused(data: bytes) -> None:
    try:
        (pair,) = control_messages.unpack_pairs(data, LIMITS)
    except ProtocolViolation:
        return
    assert pair.number < 1 << 24
    assert 1 <= pair.path_mtu <= LIMITS.path_mtu
    assert pair.max_outstanding_reads <= LIMITS.max_outstanding_reads


def test_a_grant_ends_with_success_or_an_error_text() -> None:
    assert decode(control_messages.result(5, None)) == (Kind.RESULT, Code.OK, 0, 0, 0, 5, 0, 0)
    frame = control_messages.result(5, IntegrityError("bad"))
    assert decode(frame[:HEADER_BYTES]).code is Code.CORRUPT
    assert frame[HEADER_BYTES:] == b"bad"


def queue_of(depth: int) -> tuple[SendQueue[int], deque[tuple[FakePair, Request]]]:
    """Returns a send queue and the requests it has posted, none of which completes by itself."""
    wire, posted = Wire(), deque[tuple[FakePair, Request]]()
    wire.frozen = posted
    pair = wire.open(PORT).make_queue_pair(None, send_depth=depth, receive_depth=1, serves=False)
    return SendQueue(pair, 1, depth), posted


def work(owner: int, count: int) -> SliceWork[int]:
    return SliceWork(owner, Op.READ, [(i, i, 1) for i in range(count)], 1, 2)


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=10), depth=st.integers(1, 4 * CHAIN))
def test_work_ends_in_order_and_the_queue_is_never_overfull(sizes: list[int], depth: int) -> None:
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


def test_given_up_work_is_not_posted() -> None:
    queue, posted = queue_of(1)
    queue.submit(work(0, 3))
    assert queue.give_up() == 1
    queue.completed()
    assert len(posted) == 1


def test_runs_are_absolute_not_empty_and_within_the_message_limit() -> None:
    runs = runs_of(rows((0, 100, 10), (50, 0, 0), (20, 200, 25)), 1000, 5000, 10)
    assert [tuple(run) for run in runs] == [(1000, 5100, 10), (1020, 5200, 10), (1030, 5210, 10), (1040, 5220, 5)]
    assert runs_of(np.empty((0, 3), dtype=np.int64), 0, 0, 10) == []


def test_rdma_without_pyverbs_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    monkeypatch.setattr(transfer_engine, "_TRANSPORTS", {"rdma": RdmaTransport})
    verbs.pyverbs.cache_clear()  # a failed import is not cached, so later tests import again
    engine = TransferEngine(cluster_token="t", options=TransferOptions(transports=("rdma",)))
    with pytest.raises(ConfigError, match=r"python3-pyverbs.*moonserve\[rdma\]"):
        engine.start()


def test_importing_pyverbs_leaves_the_root_logger_unchanged() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    with verbs.root_logger_untouched():
        root.addHandler(logging.NullHandler())
        root.setLevel(logging.DEBUG)
    assert (root.handlers, root.level) == before
