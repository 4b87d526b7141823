"""Hints about the further use of objects: what leaves first, what stays, and that no client can pin the store."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.kvstore.state.allocator import ALIGNMENT
from moonserve.kvstore.state.eviction import POLICY_NAMES
from moonserve.kvstore.state.eviction.retention import MAX_KEPT_SHARE
from moonserve.kvstore.state.objects import PutRequest
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.request import NO_HINTS, CacheHints
from tests.kvstore.state.tiered import Tiered, chain, key
from tests.thoroughness import examples

LOW = CacheHints(low_priority=True)
SOON = CacheHints(return_within_s=60.0)


def put(node: Tiered, *numbers: int, hints: CacheHints = NO_HINTS, now: float = 0.0, tenant: str = "") -> None:
    """Stores one chain."""
    node.put(chain(*numbers, hints=hints, tenant=tenant), now)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_objects_of_low_priority_leave_before_all_others_in_the_order_of_the_policy(policy: str) -> None:
    node = Tiered.make(4, None, policy=policy)
    put(node, 1)
    node.put_each(2, 3, hints=LOW)
    node.put_each(4, 5, 6, 7)
    left = [number for number in (1, 2, 3, 4, 5, 6, 7) if number not in node.in_memory()]
    assert left[1:] == [2, 3]
    assert len(left) == 3  # and one without a hint


def test_one_put_of_normal_priority_ends_the_low_priority_of_an_object() -> None:
    node = Tiered.make(2, None)
    put(node, 1, hints=LOW)
    node.put_each(2, 1, 3)
    assert node.in_memory() == [1, 3]


def test_a_put_cannot_make_an_object_that_is_present_leave_earlier() -> None:
    node = Tiered.make(3, None)
    node.put_each(1, 2)
    put(node, 2, hints=CacheHints(ttl_s=1.0, low_priority=True))
    node.put_each(3, 4, now=5.0)
    assert node.in_memory() == [2, 3, 4]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_chain_that_is_expected_outlives_others_until_its_time_is_over(policy: str) -> None:
    node = Tiered.make(6, None, policy=policy)
    put(node, 1, 2, hints=SOON)
    node.put_each(*range(10, 30), now=59.0)
    assert {1, 2} <= {*node.in_memory()}
    node.put_each(*range(30, 60), now=61.0)
    assert not {1, 2} & {*node.in_memory()}


def test_a_return_ends_the_expectation() -> None:
    node = Tiered.make(4, None)
    put(node, 1, hints=SOON)
    node.use(1)
    put(node, 2)
    put(node, *range(10, 14))
    assert 1 not in node.in_memory()


def test_an_object_unused_for_its_ttl_leaves_first_and_a_use_prolongs_it() -> None:
    node = Tiered.make(3, None)
    node.put_each(1, 2, hints=CacheHints(ttl_s=10.0))
    node.state.catalog.evictor.advance(5.0)
    node.use(1)
    put(node, 3, now=6.0)
    node.use(2, 3)
    node.state.catalog.evictor.advance(15.5)  # the TTL of 1 is over
    put(node, 4, now=15.5)
    assert node.in_memory() == [2, 3, 4]


def test_expected_returns_keep_at_most_half_of_the_memory_and_the_next_ones_win() -> None:
    node = Tiered.make(8, None)
    for number, within_s in ((1, 60.0), (2, 40.0), (3, 70.0), (4, 50.0)):
        put(node, 10 * number, 10 * number + 1, hints=CacheHints(return_within_s=within_s))
    node.tiers()
    node.put_each(*range(100, 140))
    assert [number for number in node.in_memory() if number < 100] == [20, 21, 40, 41]
    put(node, *range(50, 56), hints=SOON)  # more than half alone
    node.put_each(*range(60, 80))
    assert not [number for number in node.in_memory() if 50 <= number < 60]


def test_a_block_stays_for_as_long_as_the_last_chain_that_is_kept_with_it() -> None:
    node = Tiered.make(8, None)
    put(node, 1, 2, hints=CacheHints(return_within_s=60.0))
    put(node, 1, 3, hints=CacheHints(return_within_s=40.0))
    node.use(1, 3)
    put(node, 1, 4, hints=CacheHints(return_within_s=20.0))
    node.put_each(*range(100, 140), now=30.0)
    assert [number for number in node.in_memory() if number < 100] == [1, 2]


def test_a_hint_keeps_nothing_beyond_its_tenants_quota() -> None:
    node = Tiered.make(8, None, quotas={"alice": 2})
    put(node, 1, 2, hints=SOON, tenant="alice")
    put(node, 3, tenant="alice")
    assert node.in_memory() == [1, 3]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_hint_with_an_impossible_time_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match="must be above 0"):
        CacheHints(ttl_s=seconds)


HINTS = st.builds(
    CacheHints,
    return_within_s=st.sampled_from([None, 5.0, 50.0]),
    ttl_s=st.sampled_from([None, 3.0, 30.0]),
    low_priority=st.booleans(),
)
STEPS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 4), HINTS, st.sampled_from([0.0, 1.0, 10.0]), st.booleans()),
    max_size=40,
)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@settings(max_examples=examples(30), deadline=None)
@given(steps=STEPS, disk=st.sampled_from([None, 12]))
def test_hints_conserve_space_and_bound_what_they_keep(
    policy: str, steps: list[tuple[int, int, CacheHints, float, bool]], disk: int | None
) -> None:
    """`validate`, which `tiers` calls, checks both. What lasts when much else arrives shows it too, where the policy
    keeps nothing for its uses."""
    node, now = Tiered.make(8, disk, policy=policy), 0.0
    for number, depth, hints, seconds, uses in steps:
        now += seconds
        numbers = [10 * number + each for each in range(depth)]
        put(node, *numbers, hints=hints, now=now)
        if uses:
            node.use(*numbers)
        if disk is not None:
            node.written(node.demotions())
        node.tiers()
    for number in range(100, 130):
        put(node, number, now=now)
        node.written(node.demotions() if disk is not None else ())
    kept = [number for number in node.in_memory() if number < 100]
    assert len(kept) <= 8 * MAX_KEPT_SHARE or policy not in ("lru", "fifo")
    assert all(parent in kept for parent, follower in pairwise(range(70)) if follower in kept and follower % 10)


def test_a_circle_of_parents_is_not_expected() -> None:
    node = Tiered.make(8, None)
    circle = [(1, 2), (2, 1)]
    for number, parent in circle:
        wish = PutRequest(key=key(number), parent=key(parent), length=ALIGNMENT, hints=SOON)
        node.put([wish])
    assert node.in_memory() == [1, 2]
