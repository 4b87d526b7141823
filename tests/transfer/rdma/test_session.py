"""What can go wrong between a session, its target and the devices below them, and what is not believed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import IntegrityError, InvalidRequest, PeerLost, StaleLease
from tests.patience import NEVER_S, PATIENCE_S
from tests.transfer.conftest import MakePair, Pair
from tests.transfer.fake_fabric import LIMITS, PORT, FakeDevice, Wire
from transfer import Op, RemoteSegment, Transfer
from transfer.rdma import control
from transfer.rdma.control import PAIR_BYTES, RemoteKey
from transfer.rdma.rail import RegisteredMemory
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
    pair.far.close_window(pair.window_id)  # while it is frozen, which only this test ends
    wire.thaw()
    with pytest.raises(StaleLease):
        batch.wait(PATIENCE_S)
    assert pair.memory.buffer == b"f" * (1 << 20)


def test_a_read_that_hangs_ends_with_its_deadline_and_fills_nothing_later(pair: Pair, wire: Wire) -> None:
    wire.freeze()
    batch = pair.near.submit([pair.read(0, 0, 1 << 20)], deadline_s=0.3)
    with pytest.raises(PeerLost):
        batch.wait(PATIENCE_S)
    wire.thaw()
    assert pair.local.buffer == b"n" * (1 << 20)


def test_a_forgotten_peer_ends_what_hangs_at_once(pair: Pair, wire: Wire) -> None:
    wire.freeze()
    batch = pair.near.submit([pair.read(0, 0, 4096)], deadline_s=NEVER_S)
    assert wire.has_frozen.wait(PATIENCE_S)
    pair.near.forget(pair.far.address)
    with pytest.raises(PeerLost):
        batch.wait(PATIENCE_S)
    wire.thaw()
    assert pair.local.buffer[:4096] == b"n" * 4096


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
    assert len(wire.regions) == 2  # near's memory and far's other
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
    """A connection that ends at once; `on_end` is what happens meanwhile."""

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self.end = on_end


@pytest.mark.parametrize("access", ["readable", "writable"])
def test_a_connection_that_found_a_segment_before_its_removal_is_told_no_key_of_it(wire: Wire, access: str) -> None:
    """The keys are there still while the removal waits for the connections that were told them."""
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


# What the ends tell each other.


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
