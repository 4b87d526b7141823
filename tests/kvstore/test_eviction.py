"""What every eviction policy promises, and the order of each."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore import eviction
from kvstore.eviction import EvictionPolicy, order
from protocol.errors import ConfigError
from protocol.keys import BlockKey

KEYS = [BlockKey(n.to_bytes(16, "little")) for n in range(8)]


def make_with(name: str, keys: Iterable[BlockKey]) -> EvictionPolicy:
    """All of them on offer, each a chain of its own."""
    policy = eviction.make(name)
    for key in keys:
        add(policy, key)
    return policy


def add(policy: EvictionPolicy, key: BlockKey, parent: BlockKey | None = None) -> None:
    policy.added(key, parent)
    policy.offer(key)


def evict(policy: EvictionPolicy) -> BlockKey | None:
    victim = policy.victim()
    if victim is not None:
        policy.forget(victim)
    return victim


def drain(policy: EvictionPolicy) -> list[BlockKey]:
    gone = []
    while (victim := evict(policy)) is not None:
        gone.append(victim)
    return gone


def num_entries(thing: object) -> int:
    """Everything in the containers of a policy, however deep."""
    if isinstance(thing, dict | list | set):
        return len(thing)
    if type(thing).__module__.startswith("kvstore.eviction"):
        return sum(map(num_entries, getattr(thing, "__dict__", {}).values()))
    return 0


class Contract(RuleBasedStateMachine):
    """Any sequence of calls that the catalog may make."""

    policy_name: str
    keys = st.sampled_from(KEYS)

    def __init__(self) -> None:
        super().__init__()
        self.policy = eviction.make(self.policy_name)
        self.ages: list[BlockKey] = []  # residents, least recently used first
        self.offered: set[BlockKey] = set()

    @rule(key=keys, parent=st.none() | keys)
    def add(self, key: BlockKey, parent: BlockKey | None) -> None:
        if key not in self.ages and key != parent:
            self.policy.added(key, parent)
            self.ages.append(key)

    @rule(key=keys, times=st.integers(1, 100))
    def use(self, key: BlockKey, times: int) -> None:
        if key in self.ages:
            for _ in range(times):
                self.policy.used(key)
            self.ages.remove(key)
            self.ages.append(key)

    @rule(key=keys, times=st.integers(1, 100))
    def offer(self, key: BlockKey, times: int) -> None:
        if key in self.ages:
            for _ in range(times):
                self.policy.withdraw(key)
                self.policy.offer(key)
            self.offered.add(key)

    @rule(key=keys)
    def withdraw(self, key: BlockKey) -> None:
        self.policy.withdraw(key)
        self.offered.discard(key)

    @rule(key=keys)
    def forget(self, key: BlockKey) -> None:
        self.policy.forget(key)
        self._gone(key)

    @rule()
    def evict(self) -> None:
        victim = evict(self.policy)
        if victim is not None:
            self._gone(victim)

    @rule()
    def drain(self) -> None:
        gone = drain(self.policy)
        assert set(gone) == self.offered
        assert len(gone) == len(self.offered)
        for key in gone:
            self._gone(key)

    def _gone(self, key: BlockKey) -> None:
        self.offered.discard(key)
        if key in self.ages:
            self.ages.remove(key)

    @invariant()
    def the_victim_is_on_offer_and_stays_the_same_until_something_happens(self) -> None:
        victim = self.policy.victim()
        assert (victim in self.offered) if self.offered else (victim is None)
        assert self.policy.victim() == victim

    @invariant()
    def lru_names_the_oldest_on_offer(self) -> None:
        if self.policy_name == "lru":
            oldest = next((key for key in self.ages if key in self.offered), None)
            assert self.policy.victim() == oldest


@pytest.mark.parametrize("name", eviction.POLICY_NAMES)
def test_every_policy_keeps_the_contract(name: str) -> None:
    run_state_machine_as_test(
        type("ContractOfPolicy", (Contract,), {"policy_name": name}),
        settings=settings(max_examples=50, stateful_step_count=40, deadline=None),
    )


@pytest.mark.parametrize("name", eviction.POLICY_NAMES)
@pytest.mark.parametrize("evicted", [True, False])
def test_no_policy_remembers_keys_that_are_gone(name: str, evicted: bool) -> None:
    policy = eviction.make(name)
    keys = [BlockKey(n.to_bytes(16, "little")) for n in range(2000)]
    for number, key in enumerate(keys):
        add(policy, key, keys[number - 1] if number % 10 else None)
        policy.used(key)
    if evicted:
        assert len(drain(policy)) == len(keys)
    for key in keys:
        policy.forget(key)
    assert num_entries(policy) <= 2 * order.COMPACT_AT_LEAST


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="lru, lfu, fifo, length-aware, s3-fifo"):
        eviction.make("random")


@pytest.mark.parametrize("name", eviction.POLICY_NAMES)
def test_a_withdrawn_key_keeps_its_age_when_it_returns(name: str) -> None:
    policy = make_with(name, KEYS[:2])
    policy.withdraw(KEYS[0])
    assert policy.victim() == KEYS[1]
    policy.offer(KEYS[0])
    assert drain(policy) == [KEYS[0], KEYS[1]]


def test_lru_evicts_what_was_used_longest_ago() -> None:
    policy = make_with("lru", KEYS[:4])
    policy.used(KEYS[0])
    assert drain(policy) == [KEYS[1], KEYS[2], KEYS[3], KEYS[0]]


def test_fifo_does_not_look_at_uses() -> None:
    policy = make_with("fifo", KEYS[:3])
    policy.used(KEYS[0])
    assert drain(policy) == KEYS[:3]


def test_lfu_evicts_what_was_used_least_often_and_then_what_was_used_longest_ago() -> None:
    policy = make_with("lfu", KEYS[:4])
    for key in (KEYS[0], KEYS[0], KEYS[1], KEYS[2]):
        policy.used(key)
    assert drain(policy) == [KEYS[3], KEYS[1], KEYS[2], KEYS[0]]


def test_lfu_lets_go_in_the_end_of_what_was_popular_once() -> None:
    policy = make_with("lfu", KEYS[:1])
    for _ in range(3):
        policy.used(KEYS[0])
    newcomers = [BlockKey(n.to_bytes(16, "big")) for n in range(1, 9)]
    gone = []
    for key in newcomers:
        add(policy, key)
        gone.append(evict(policy))
    assert gone[:3] == newcomers[:3]  # plain counts would go on like this for ever
    assert KEYS[0] in gone


def test_length_aware_evicts_the_later_of_two_blocks_that_were_used_equally_often() -> None:
    policy = eviction.make("length-aware")
    add(policy, KEYS[0])
    add(policy, KEYS[1], KEYS[0])
    add(policy, KEYS[2])
    add(policy, KEYS[3], KEYS[1])
    policy.used(KEYS[3])
    assert drain(policy) == [KEYS[1], KEYS[0], KEYS[2], KEYS[3]]


def test_length_aware_takes_a_block_whose_parent_is_not_here_for_the_first_of_its_chain() -> None:
    policy = eviction.make("length-aware")
    add(policy, KEYS[1], KEYS[0])
    add(policy, KEYS[2], KEYS[1])
    add(policy, KEYS[3])
    assert drain(policy) == [KEYS[2], KEYS[1], KEYS[3]]


def test_s3_fifo_keeps_what_was_read_twice_while_it_was_new() -> None:
    policy = make_with("s3-fifo", KEYS[:3])
    for key in (KEYS[0], KEYS[0], KEYS[2], KEYS[1]):
        policy.used(key)
    # Read once is not enough, and being read later does not help.
    assert drain(policy) == [KEYS[1], KEYS[2], KEYS[0]]


def test_s3_fifo_takes_a_ghost_straight_into_the_main_queue() -> None:
    policy = make_with("s3-fifo", KEYS[:3])
    assert evict(policy) == KEYS[0]
    add(policy, KEYS[0])
    add(policy, KEYS[3])
    assert drain(policy) == [KEYS[1], KEYS[2], KEYS[3], KEYS[0]]


def test_s3_fifo_sends_what_was_read_round_the_main_queue_again() -> None:
    policy = make_with("s3-fifo", KEYS[:4])
    for key in KEYS[:2] * 2:
        policy.used(key)
    assert [evict(policy), evict(policy)] == KEYS[2:4]  # the others are in the main queue now
    policy.used(KEYS[0])
    assert drain(policy) == [KEYS[1], KEYS[0]]


def test_s3_fifo_judges_a_head_of_a_chain_when_it_is_offered_where_it_stood() -> None:
    policy = make_with("s3-fifo", KEYS[:3])
    policy.withdraw(KEYS[0])
    assert evict(policy) == KEYS[1]
    policy.offer(KEYS[0])
    assert drain(policy) == [KEYS[0], KEYS[2]]


def make_with_lifetime(lifetime: int) -> EvictionPolicy:
    """reuse-credit, after one block of this age was evicted; as many are resident, so that short runs owe little."""
    policy = eviction.make("reuse-credit")
    for number in range(1, lifetime + 2):
        policy.added(BlockKey(number.to_bytes(16, "big")), None)
    policy.offer(BlockKey((1).to_bytes(16, "big")))
    assert evict(policy) == BlockKey((1).to_bytes(16, "big"))
    return policy


def test_reuse_credit_lets_a_read_block_outlast_a_newer_unread_one_by_a_lifetime() -> None:
    policy = make_with_lifetime(1000)
    add(policy, KEYS[0])
    policy.used(KEYS[0])
    for key in KEYS[1:4]:
        add(policy, key)
    assert drain(policy) == [*KEYS[1:4], KEYS[0]]


def test_reuse_credit_ends_with_its_lifetime() -> None:
    policy = make_with_lifetime(1000)
    add(policy, KEYS[0])
    policy.used(KEYS[0])
    add(policy, KEYS[1])
    policy.used(KEYS[1])
    for _ in range(2000):
        policy.used(KEYS[1])
    add(policy, KEYS[2])
    assert drain(policy) == [KEYS[0], KEYS[2], KEYS[1]]


def test_reuse_credit_evicts_the_end_of_a_long_run_before_older_short_ones() -> None:
    policy = make_with_lifetime(1000)
    add(policy, KEYS[0])
    run = [BlockKey(n.to_bytes(16, "little")) for n in range(100, 200)]
    for parent, key in zip([None, *run], run, strict=False):
        add(policy, key, parent)
    gone = drain(policy)
    assert gone[0] == run[-1]
    assert 0 < gone.index(KEYS[0]) < len(run)


def test_reuse_credit_counts_a_run_from_where_it_leaves_what_was_read() -> None:
    policy = make_with_lifetime(1000)
    read = [BlockKey(n.to_bytes(16, "little")) for n in range(100, 200)]
    for parent, key in zip([None, *read], read, strict=False):
        policy.added(key, parent)
    for key in reversed(read):
        policy.used(key)
    add(policy, KEYS[0])
    add(policy, KEYS[1], read[-1])
    assert drain(policy) == [KEYS[0], KEYS[1]]
