"""The contract of all eviction policies, and the eviction order of each."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from moonserve.kvstore.index_layout import NO_RECORD, Record
from moonserve.kvstore.state import eviction
from moonserve.kvstore.state.eviction.base import EvictionPolicy
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import BlockKey
from tests.kvstore.state.tiered import key as key_of
from tests.thoroughness import examples

RECORDS = list(range(8))


def make_with(name: str, records: Iterable[Record]) -> EvictionPolicy:
    """Builds a policy in which all records are offered, each without a parent."""
    policy = eviction.make(name)
    for record in records:
        add(policy, record)
    return policy


def add(policy: EvictionPolicy, record: Record, parent: Record = NO_RECORD) -> None:
    policy.added(record, key_of(record), parent)
    policy.offer(record)


def evict(policy: EvictionPolicy) -> Record:
    victim = policy.victim()
    if victim != NO_RECORD:
        policy.forget(victim)
    return victim


def drain(policy: EvictionPolicy) -> list[Record]:
    gone = []
    while (victim := evict(policy)) != NO_RECORD:
        gone.append(victim)
    return gone


class Contract(RuleBasedStateMachine):
    """Checks a policy over any sequence of calls that the catalog may make."""

    policy_name: str
    records = st.sampled_from(RECORDS)

    def __init__(self) -> None:
        super().__init__()
        self.policy = eviction.make(self.policy_name)
        self.ages: list[Record] = []  # residents, least recently used first
        self.offered: set[Record] = set()

    @rule(record=records, parent=st.just(NO_RECORD) | records)
    def add(self, record: Record, parent: Record) -> None:
        if record not in self.ages and record != parent:
            self.policy.added(record, key_of(record), parent if parent in self.ages else NO_RECORD)
            self.ages.append(record)

    @rule(record=records, times=st.integers(1, 100))
    def use(self, record: Record, times: int) -> None:
        if record in self.ages:
            for _ in range(times):
                self.policy.used(record)
            self.ages.remove(record)
            self.ages.append(record)

    @rule(used=st.lists(records, max_size=20))
    def use_all(self, used: list[Record]) -> None:
        used = [record for record in used if record in self.ages]
        self.policy.used_all(np.array(used, np.int64))
        for record in used:
            self.ages.remove(record)
            self.ages.append(record)

    @rule(record=records, times=st.integers(1, 100))
    def offer(self, record: Record, times: int) -> None:
        if record in self.ages:
            for _ in range(times):
                self.policy.withdraw(record)
                self.policy.offer(record)
            self.offered.add(record)

    @rule(record=records)
    def withdraw(self, record: Record) -> None:
        self.policy.withdraw(record)
        self.offered.discard(record)

    @rule(record=records)
    def forget(self, record: Record) -> None:
        self.policy.forget(record)
        self._gone(record)

    @rule()
    def evict(self) -> None:
        victim = evict(self.policy)
        if victim != NO_RECORD:
            self._gone(victim)

    @rule()
    def drain(self) -> None:
        gone = drain(self.policy)
        assert set(gone) == self.offered
        assert len(gone) == len(self.offered)
        for record in gone:
            self._gone(record)

    def _gone(self, record: Record) -> None:
        self.offered.discard(record)
        if record in self.ages:
            self.ages.remove(record)

    @invariant()
    def the_victim_is_on_offer_and_stays_the_same_until_something_happens(self) -> None:
        victim = self.policy.victim()
        assert (victim in self.offered) if self.offered else (victim == NO_RECORD)
        assert self.policy.victim() == victim

    @invariant()
    def lru_names_the_oldest_on_offer(self) -> None:
        if self.policy_name == "lru":
            oldest = next((record for record in self.ages if record in self.offered), NO_RECORD)
            assert self.policy.victim() == oldest


@pytest.mark.parametrize("name", eviction.POLICY_NAMES)
def test_every_policy_keeps_the_contract(name: str) -> None:
    run_state_machine_as_test(
        type("ContractOfPolicy", (Contract,), {"policy_name": name}),
        settings=settings(max_examples=examples(20), stateful_step_count=40, deadline=None),
    )


@pytest.mark.parametrize("name", eviction.POLICY_NAMES)
@pytest.mark.parametrize("evicted", [True, False])
def test_no_policy_remembers_blocks_that_are_gone(name: str, evicted: bool) -> None:
    policy = eviction.make(name)
    sizes = []
    for generation in range(10):
        fill(policy, 2000, generation)
        if evicted:
            assert len(drain(policy)) == 2000
        for record in range(2000):
            policy.forget(record)
        assert policy.victim() == NO_RECORD
        sizes.append(policy.nbytes)
    assert len(set(sizes[2:])) == 1


def fill(policy: EvictionPolicy, count: int, generation: int = 0) -> None:
    """Adds chains of ten records that are read once, under keys unique to this generation."""
    for record in range(count):
        key = BlockKey((generation * count + record).to_bytes(16, "big"))
        policy.added(record, key, record - 1 if record % 10 else NO_RECORD)
        policy.offer(record)
        policy.used(record)


@pytest.mark.parametrize("name", eviction.POLICY_NAMES)
def test_a_policy_keeps_few_bytes_per_block(name: str) -> None:
    policy = eviction.make(name)
    fill(policy, 50_000)
    assert policy.nbytes / 50_000 < (26 if name in ("lru", "fifo") else 50)


@pytest.mark.parametrize("name", eviction.POLICY_NAMES)
@settings(deadline=None)
@given(used=st.lists(st.sampled_from(RECORDS), max_size=40), cut=st.integers(0, 40))
def test_many_uses_at_once_count_as_one_after_the_other(name: str, used: list[Record], cut: int) -> None:
    at_once, one_by_one = (make_with(name, RECORDS) for _ in range(2))
    for part in (used[:cut], used[cut:]):
        at_once.used_all(np.array(part, np.int64))
        for record in part:
            one_by_one.used(record)
        assert evict(at_once) == evict(one_by_one)
        for policy in (at_once, one_by_one):
            for record in RECORDS:
                policy.forget(record)
                add(policy, record)
    assert drain(at_once) == drain(one_by_one)


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="lru, lfu, fifo, length-aware, s3-fifo"):
        eviction.make("random")


@pytest.mark.parametrize("name", eviction.POLICY_NAMES)
def test_a_withdrawn_block_keeps_its_age_when_it_returns(name: str) -> None:
    policy = make_with(name, RECORDS[:2])
    policy.withdraw(0)
    assert policy.victim() == 1
    policy.offer(0)
    assert drain(policy) == [0, 1]


def play(policy: EvictionPolicy, steps: list[str]) -> None:
    """Runs steps, each a call and its records: `3/1` is 3 with parent 1. `evict` names the expected victims."""
    for what, *records in map(str.split, steps):
        for record, _, parent in (each.partition("/") for each in records):
            if what == "add":
                add(policy, int(record), int(parent or NO_RECORD))
            elif what == "evict":
                assert evict(policy) == int(record)
            else:
                getattr(policy, what)(int(record))


@pytest.mark.parametrize(
    ("name", "steps", "order"),
    [
        pytest.param("lru", ["add 0 1 2 3", "used 0"], [1, 2, 3, 0], id="lru: used longest ago"),
        pytest.param("fifo", ["add 0 1 2", "used 0"], [0, 1, 2], id="fifo: uses do not count"),
        pytest.param("lfu", ["add 0 1 2 3", "used 0 0 1 2"], [3, 1, 2, 0], id="lfu: used least, then lru"),
        # One read is not enough, and a later read does not help.
        pytest.param("s3-fifo", ["add 0 1 2", "used 0 0 2 1"], [1, 2, 0], id="s3-fifo: read twice"),
        pytest.param("s3-fifo", ["add 0 1 2", "evict 0", "add 0 3"], [1, 2, 3, 0], id="s3-fifo: a ghost into main"),
        pytest.param(  # 0 and 1 are in the main queue after the evictions
            "s3-fifo", ["add 0 1 2 3", "used 0 0 1 1", "evict 2 3", "used 0 0 1"], [1, 0], id="s3-fifo: round main"
        ),
        pytest.param("s3-fifo", ["add 0 1 2 3", "used 0 0 0 1 1", "evict 2 3"], [0, 1], id="s3-fifo: counts anew"),
        pytest.param(  # as happens to the head of a chain
            "s3-fifo", ["add 0 1 2", "withdraw 0", "evict 1", "offer 0"], [0, 2], id="s3-fifo: judged when offered"
        ),
        pytest.param("length-aware", ["add 0 1/0 2 3/1", "used 3"], [1, 0, 2, 3], id="deeper first"),
        # An absent parent makes no chain.
        pytest.param("length-aware", ["add 0/9 1/0 2/1 3"], [2, 1, 0, 3], id="from what is here"),
    ],
)
def test_the_eviction_order_of_each_policy(name: str, steps: list[str], order: list[Record]) -> None:
    policy = eviction.make(name)
    play(policy, steps)
    assert drain(policy) == order


def test_lfu_evicts_formerly_popular_blocks_in_the_end() -> None:
    policy = make_with("lfu", RECORDS[:1])
    for _ in range(3):
        policy.used(0)
    newcomers = list(range(1, 9))
    gone = []
    for record in newcomers:
        add(policy, record)
        gone.append(evict(policy))
    assert gone[:3] == newcomers[:3]  # plain counts would do this for ever
    assert 0 in gone


@pytest.fixture
def with_lifetime() -> EvictionPolicy:
    """reuse-credit after the eviction of a block of age 1000; 1000 are resident, so that short runs owe little."""
    policy = eviction.make("reuse-credit")
    for record in range(10_000, 11_001):
        policy.added(record, key_of(record), NO_RECORD)
    policy.offer(10_000)
    assert evict(policy) == 10_000
    return policy


def test_reuse_credit_lets_a_read_block_outlast_a_newer_unread_one_by_a_lifetime(with_lifetime: EvictionPolicy) -> None:
    add(with_lifetime, 0)
    with_lifetime.used(0)
    for record in RECORDS[1:4]:
        add(with_lifetime, record)
    assert drain(with_lifetime) == [*RECORDS[1:4], 0]


def test_reuse_credit_ends_with_its_lifetime(with_lifetime: EvictionPolicy) -> None:
    for record in (0, 1):
        add(with_lifetime, record)
        with_lifetime.used(record)
    for _ in range(2000):
        with_lifetime.used(1)
    add(with_lifetime, 2)
    assert drain(with_lifetime) == [0, 2, 1]


def test_reuse_credit_evicts_the_end_of_a_long_run_before_older_short_ones(with_lifetime: EvictionPolicy) -> None:
    add(with_lifetime, 0)
    run = list(range(100, 200))
    for parent, record in zip([NO_RECORD, *run], run, strict=False):
        add(with_lifetime, record, parent)
    gone = drain(with_lifetime)
    assert gone[0] == run[-1]
    assert 0 < gone.index(0) < len(run)


def test_reuse_credit_counts_a_run_from_its_last_read_block(with_lifetime: EvictionPolicy) -> None:
    read = list(range(100, 200))
    for parent, record in zip([NO_RECORD, *read], read, strict=False):
        with_lifetime.added(record, key_of(record), parent)
    for record in reversed(read):
        with_lifetime.used(record)
    add(with_lifetime, 0)
    add(with_lifetime, 1, read[-1])
    assert drain(with_lifetime) == [0, 1]
