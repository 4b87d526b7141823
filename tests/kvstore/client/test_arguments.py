"""Checks of call arguments: addresses, keys, slots in registered memory, and deadlines."""

from collections.abc import Iterator

import pytest

from moonserve.kvstore.client.connecting import default_options
from moonserve.kvstore.client.node_access import objects
from moonserve.kvstore.client.node_access.buffers import BufferSlots, portions
from moonserve.kvstore.client.node_access.deadline import PATIENCE, Deadline
from moonserve.protocol.errors import ConfigError, DeadlineExceeded, InvalidRequest
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.transfer import Segment, TransferEngine

A, B, C = (BlockKey(bytes([number]) * 16) for number in range(3))
SENTINEL_URL = "redis+sentinel://user:secret@127.0.0.1:26379,127.0.0.2:26379/main/0"
HUNDRED_S = int(PATIENCE.slowest_bytes_s) * 100
"""Number of bytes that extends a deadline by 100 s."""


# The address is loopback if the registry's host cannot be resolved.
@pytest.mark.parametrize("url", ["127.0.0.1:7000", "node://127.0.0.1:7000", SENTINEL_URL, "nowhere.invalid:7000"])
def test_transfers_leave_by_the_address_that_leads_to_the_registry(url: str) -> None:
    assert default_options(url).host == "127.0.0.1"


@pytest.mark.parametrize("url", ["node://127.0.0.1:port", "127.0.0.1:99999", "redis://[::1"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        default_options(url)


def test_a_chain_has_a_head_and_parents_and_a_plain_key_is_its_own_head() -> None:
    assert objects.chain([A, B, C]) == [objects.Block(A, A, None), objects.Block(B, A, A), objects.Block(C, A, B)]
    assert objects.chain([]) == []
    assert objects.block_of(b"key") == objects.Block(objects.plain_key(b"key"), objects.plain_key(b"key"))
    assert objects.block_of(A).key != A, "bytes of a block key's length are a plain key too"


def test_an_invalid_key_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not str"):
        objects.block_of("text")  # type: ignore[arg-type]
    for wrong in (b"one", "text", ["text"], [3], [[]], [None]):
        for of in (objects.Keys, objects.blocks_of):
            with pytest.raises(InvalidRequest):
                of(wrong)  # type: ignore[arg-type]


def test_the_keys_of_a_call_are_those_of_their_blocks() -> None:
    """`Keys` gives the keys of `blocks_of`, for cached and for new keys, keys of any type, and any number of keys."""
    given: list[objects.Key] = [b"one", *objects.chain([A, B]), b"", bytes(200)]
    given += [bytearray(b"two"), memoryview(b"one")]  # type: ignore[list-item]
    for _ in range(2):
        keys = objects.Keys(given)
        assert keys.blocks() == objects.blocks_of(given)
        assert keys.stored == [block.key for block in keys.blocks()]
        assert len(keys) == len(given)
        assert keys.at([0, 2]).stored == [keys.stored[0], keys.stored[2]]
    many = [b"%d" % number for number in range(objects.KEPT_KEYS + 10)]
    for some in (many, many[:5], [b"one", b"one"]):
        assert objects.Keys(some).stored == [objects.plain_key(key) for key in some]


@pytest.fixture
def segment() -> Iterator[Segment]:
    with TransferEngine(cluster_token="slots") as engine:
        yield engine.allocate(1000)


def test_slots_are_within_the_segment_and_end_where_the_next_begins(segment: Segment) -> None:
    assert BufferSlots.checked(segment, [500, 0, 100]).capacities.tolist() == [500, 100, 400]
    BufferSlots.checked(segment, [0, 900], [900, 100])
    for offsets, rooms in [([0], [1001]), ([-1], [5]), ([990], [11]), ([1000], None), ([0], [1, 2])]:
        with pytest.raises(InvalidRequest):
            BufferSlots.checked(segment, offsets, rooms)


def test_packed_slots_are_contiguous(segment: Segment) -> None:
    slots = BufferSlots.packed(segment, [10, 0, 20])
    assert slots.offsets.tolist() == [0, 10, 10]
    segment.buffer[10:30] = bytes(range(20))
    assert bytes(slots.memory(2, 20)) == bytes(range(20))


def test_portions_stay_within_the_limit_but_for_single_large_objects() -> None:
    parts = [(part.start, part.stop) for part in portions([4, 4, 4, 20, 1], limit=10)]
    assert parts == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert not list(portions([], limit=10))


@pytest.mark.parametrize(("timeout_s", "left_s", "allowed_s"), [(None, PATIENCE.base_s, 100), (50.0, 50.0, 0)])
def test_bytes_extend_only_a_time_that_the_caller_has_not_set(
    timeout_s: float | None, left_s: float, allowed_s: float
) -> None:
    """Bytes extend a default deadline once, also if an attempt with half of its time reports them."""
    deadline = Deadline(timeout_s)
    attempt = deadline.half_left()
    assert deadline.left_s() == pytest.approx(left_s, abs=1.0)
    for nbytes in (HUNDRED_S, 1):
        attempt.extend_for_bytes(nbytes)
        assert attempt.left_s() == pytest.approx(left_s / 2 + allowed_s, abs=1.0)
        assert deadline.left_s() == pytest.approx(left_s + allowed_s, abs=1.0)


def test_a_passed_deadline_raises_deadline_exceeded() -> None:
    deadline = Deadline(1e-9)
    with pytest.raises(DeadlineExceeded):
        deadline.left_s()
    assert not deadline.was_ample()
    assert Deadline(1.0).was_ample()
    for no_time in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidRequest):
            Deadline(no_time)
