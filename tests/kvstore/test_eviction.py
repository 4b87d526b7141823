"""What every eviction policy promises, and the order of each."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.eviction import EvictionPolicy, LeastRecentlyUsed
from protocol.keys import BlockKey

KEYS = [BlockKey(n.to_bytes(16, "little")) for n in range(8)]


def drain(policy: EvictionPolicy) -> list[BlockKey]:
    order = []
    while (victim := policy.victim()) is not None:
        policy.forget(victim)
        order.append(victim)
    return order


def test_lru_evicts_what_was_used_longest_ago() -> None:
    policy = LeastRecentlyUsed()
    for key in KEYS[:4]:
        policy.used(key)
        policy.offer(key)
    policy.used(KEYS[0])
    assert drain(policy) == [KEYS[1], KEYS[2], KEYS[3], KEYS[0]]


def test_a_withdrawn_key_keeps_its_age_when_it_returns() -> None:
    policy = LeastRecentlyUsed()
    for key in KEYS[:2]:
        policy.used(key)
        policy.offer(key)
    policy.withdraw(KEYS[0])
    assert policy.victim() == KEYS[1]
    policy.offer(KEYS[0])
    assert drain(policy) == [KEYS[0], KEYS[1]]


class LruAgreesWithASortedList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = LeastRecentlyUsed()
        self.ages: list[BlockKey] = []  # least recently used first
        self.offered: set[BlockKey] = set()

    keys = st.sampled_from(KEYS)

    @rule(key=keys, times=st.integers(1, 100))
    def use(self, key: BlockKey, times: int) -> None:
        for _ in range(times):
            self.policy.used(key)
        if key in self.ages:
            self.ages.remove(key)
        self.ages.append(key)

    @rule(key=keys)
    def offer(self, key: BlockKey) -> None:
        if key in self.ages:
            self.policy.offer(key)
            self.offered.add(key)

    @rule(key=keys)
    def withdraw(self, key: BlockKey) -> None:
        self.policy.withdraw(key)
        self.offered.discard(key)

    @rule(key=keys)
    def forget(self, key: BlockKey) -> None:
        self.policy.forget(key)
        self.offered.discard(key)
        if key in self.ages:
            self.ages.remove(key)

    @invariant()
    def names_the_oldest_on_offer(self) -> None:
        expected = next((key for key in self.ages if key in self.offered), None)
        assert self.policy.victim() == expected


TestLru = LruAgreesWithASortedList.TestCase
TestLru.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
