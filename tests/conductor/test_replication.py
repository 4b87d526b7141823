"""Stores are told to copy what placements waited for, and to let it go when it is cold: the pure state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from conductor.events import (
    BlockChanges,
    CopyDue,
    CopySettled,
    Deregister,
    DropDue,
    Heartbeat,
    Load,
    Phase,
    Tick,
)
from conductor.policies import make_policy
from conductor.replication import ReplicationTerms
from conductor.state import ConductorState, Limits
from kvstore.replication.ledger import UNDER_WAY_S
from protocol.errors import ConfigError
from protocol.ids import InstanceId
from protocol.keys import NO_PARENT, BlockKey
from tests.conductor.cluster import LAYOUT, Cluster, chain

CAPACITY = 1000 * LAYOUT.block_bytes
TERMS = ReplicationTerms(least_hits=4, window_s=30.0, cool_s=60.0)
LIMITS = Limits(ttft_slo_s=1000.0, tbt_slo_s=1000.0, lease_s=10_000.0)
BLOCKS = 20  # of the hot prompt, 10 tokens each
STORES = ("s0", "s1", "s2")


class Pool:
    """A conductor over three hosts, each with a prefill instance and its home store; what stores hold is kept here."""

    def __init__(
        self, terms: ReplicationTerms | None = TERMS, policy: str = "global-cache-aware"
    ) -> None:
        self.cluster = Cluster(policy=policy, limits=LIMITS)
        self.cluster.state = ConductorState(make_policy(policy, 2.0), LIMITS, replication=terms)
        self.held: dict[str, dict[BlockKey, BlockKey]] = {}
        self._next_seq: dict[str, int] = {}
        self.num_placed = 0
        for number, store in enumerate(STORES):
            host = f"host-{number}"
            self.cluster.store(store, host=host)
            self.cluster.prefill(f"p{number}", host=host, home=store)
            self.held[store], self._next_seq[store] = {}, 1
            self.tell(store)
        self.cluster.decode("d0", num_blocks=10**6)

    def tell(
        self, store: str, added: Sequence[tuple[BlockKey, BlockKey]] = (), gone: Sequence[BlockKey] = ()
    ) -> None:  # fmt: skip
        first = self._next_seq[store]
        self._next_seq[store] = first + len(added) + len(gone)
        changes = BlockChanges(
            first_seq=first, next_seq=self._next_seq[store], added=tuple(added), removed=tuple(gone)
        )
        self.cluster.send(
            Heartbeat(
                instance_id=InstanceId(store),
                epoch=1,
                load=Load(capacity_bytes=CAPACITY, free_bytes=CAPACITY),
                changes=changes,
            )
        )

    def put(self, store: str, keys: Sequence[BlockKey]) -> None:
        """A whole chain, or its leading part."""
        new = [
            (key, keys[number - 1] if number else NO_PARENT)
            for number, key in enumerate(keys)
            if key not in self.held[store]
        ]
        self.held[store].update(new)
        self.tell(store, added=new)

    def lose(self, store: str, keys: Sequence[BlockKey]) -> None:
        gone = [key for key in keys if self.held[store].pop(key, None) is not None]
        self.tell(store, gone=gone)

    def ask_for(self, keys: Sequence[BlockKey], times: int = 1) -> None:
        for _ in range(times):
            self.num_placed += 1
            self.cluster.now += 0.1
            self.cluster.place(f"r{self.num_placed}", keys=keys, tokens=len(keys) * 10 + 5)

    def finish_all(self) -> None:
        for number in range(1, self.num_placed + 1):
            self.cluster.report(f"r{number}", Phase.CANCELLED)

    def look(self, later_s: float = 1.0) -> list[CopyDue | DropDue]:
        self.cluster.now += later_s
        actions = self.cluster.send(Tick())
        return [action for action in actions if isinstance(action, CopyDue | DropDue)]

    def carry_out(self, due: CopyDue | DropDue) -> None:
        """As store nodes would."""
        if isinstance(due, DropDue):
            self.lose(due.store.instance_id, due.keys)
            return
        source = {key: step.source.instance_id for step in due.steps for key in step.keys}
        parents = {key: self.held[source[key]][key] for key in due.keys}
        self.held[due.target.instance_id].update(parents)
        self.tell(due.target.instance_id, added=tuple(parents.items()))
        self.settle(due, succeeded=True)

    def settle(self, due: CopyDue, *, succeeded: bool) -> None:
        target = InstanceId(due.target.instance_id)
        self.cluster.send(CopySettled(target=target, keys=due.keys, succeeded=succeeded))


def copies(due: Sequence[CopyDue | DropDue]) -> list[tuple[str, tuple[BlockKey, ...]]]:
    return [(d.target.instance_id, d.keys) for d in due if isinstance(d, CopyDue)]


HOT = chain("hot", BLOCKS)


def hot_pool() -> Pool:
    """A chain in one store, for which others' requests have waited."""
    pool = Pool()
    pool.put("s0", HOT)
    pool.ask_for(HOT, times=12)
    return pool


def test_what_many_waited_for_is_copied_whole_and_parents_first_to_another_host() -> None:
    due = hot_pool().look()
    assert all(isinstance(d, CopyDue) for d in due)
    (store, keys), *_ = copies(due)
    assert store in ("s1", "s2")
    assert keys == HOT
    sources = {step.source.instance_id for d in due if isinstance(d, CopyDue) for step in d.steps}
    assert sources == {"s0"}


def test_it_costs_less_than_it_saved() -> None:
    for due in hot_pool().look():
        assert isinstance(due, CopyDue)
        assert due.saved_s > TERMS.margin * due.cost_s


def test_one_replica_at_a_time_and_what_was_answered_is_not_answered_again() -> None:
    pool = hot_pool()
    [due] = pool.look()
    pool.carry_out(due)
    assert pool.look() == []
    pool.finish_all()
    assert pool.look(later_s=TERMS.window_s) == []


def test_few_requests_are_no_reason() -> None:
    pool = Pool()
    pool.put("s0", HOT)
    pool.ask_for(HOT, times=3)
    assert pool.look() == []


def test_what_nobody_waited_for_is_left_where_it_is() -> None:
    """Each request ends before the next comes, so that the holder is always free."""
    pool = Pool()
    pool.put("s0", HOT)
    for _ in range(20):
        pool.ask_for(HOT)
        pool.finish_all()
    assert pool.look() == []


def test_old_demand_is_forgotten() -> None:
    pool = hot_pool()
    assert pool.look(later_s=TERMS.window_s + 1) == []


def test_only_the_part_that_many_share_is_copied() -> None:
    pool = Pool()
    shared = chain("system", 10)
    for number in range(12):
        own = (*shared, *chain(f"own-{number}", 5))
        pool.put("s0", own)
        pool.ask_for(own)
    assert {keys for _, keys in copies(pool.look())} == {shared}


def test_a_failed_copy_is_tried_with_another_store() -> None:
    pool = hot_pool()
    [due] = pool.look()
    assert isinstance(due, CopyDue)
    pool.settle(due, succeeded=False)
    pool.ask_for(HOT, times=12)
    [other] = pool.look()
    assert isinstance(other, CopyDue)
    assert other.target.instance_id != due.target.instance_id


def test_a_cold_replica_is_dropped_children_first_and_the_original_stays() -> None:
    pool = hot_pool()
    [due] = pool.look()
    pool.carry_out(due)
    pool.finish_all()
    [drop] = pool.look(later_s=TERMS.cool_s + 1)
    assert isinstance(drop, DropDue)
    assert isinstance(due, CopyDue)
    assert drop.store.instance_id == due.target.instance_id
    assert drop.keys == HOT[::-1]
    pool.carry_out(drop)
    assert set(HOT) <= set(pool.held["s0"])
    assert pool.look(later_s=TERMS.cool_s) == []


def test_use_keeps_a_replica() -> None:
    pool = hot_pool()
    [due] = pool.look()
    pool.carry_out(due)
    assert isinstance(due, CopyDue)
    for _ in range(5):
        pool.finish_all()
        pool.ask_for(HOT, times=12)
        assert not any(
            isinstance(d, DropDue) and d.store == due.target for d in pool.look(later_s=50.0)
        )


def test_a_replica_that_has_become_the_only_one_stays() -> None:
    pool = hot_pool()
    [due] = pool.look()
    pool.carry_out(due)
    pool.finish_all()
    pool.lose("s0", HOT)
    assert pool.look(later_s=TERMS.cool_s + 1) == []


def test_a_replica_on_which_a_conversation_went_on_stays() -> None:
    pool = hot_pool()
    [due] = pool.look()
    pool.carry_out(due)
    assert isinstance(due, CopyDue)
    pool.put(due.target.instance_id, (*HOT, *chain("later", 1)))
    pool.finish_all()
    assert pool.look(later_s=TERMS.cool_s + 1) == []


def test_two_replicas_that_cool_together_leave_one_where_the_original_has_gone() -> None:
    """The second is asked before the first has said that its blocks are gone."""
    pool = hot_pool()
    [first] = pool.look()
    pool.carry_out(first)
    for _ in range(3):
        pool.ask_for(HOT, times=20)
        for due in pool.look(later_s=TERMS.window_s / 2):
            pool.carry_out(due)
    assert all(set(HOT) <= set(pool.held[store]) for store in STORES)
    pool.finish_all()
    pool.lose("s0", HOT)
    drops = pool.look(later_s=TERMS.cool_s + 1)
    assert len(drops) == 1
    assert pool.look(later_s=1.0) == []


def test_a_store_takes_no_more_replicas_than_its_share() -> None:
    pool = Pool(replace(TERMS, store_share=0.005))  # 5 of 1,000 blocks
    pool.put("s0", HOT)
    pool.ask_for(HOT, times=60)
    assert {len(keys) for _, keys in copies(pool.look())} == {5}


def test_a_draining_store_takes_none() -> None:
    pool = hot_pool()
    for store in ("s1", "s2"):
        pool.cluster.send(
            Heartbeat(
                instance_id=InstanceId(store), epoch=1, draining=True,
                load=Load(capacity_bytes=CAPACITY),
            )
        )  # fmt: skip
    assert pool.look() == []


def test_explain_tells_how_many_blocks_were_near_because_of_it() -> None:
    pool = hot_pool()
    for _ in range(3):
        for due in pool.look():
            pool.carry_out(due)
        pool.ask_for(HOT, times=12)
    decisions = [pool.cluster.state.explain(f"r{n}") for n in range(1, pool.num_placed + 1)]  # type: ignore[arg-type]
    found = [d for d in decisions if d is not None and d.replica_blocks]
    assert found
    for decision in found:
        assert decision.replica_blocks <= sum(number for _, _, number in decision.sources)


def test_nothing_is_copied_unless_wished() -> None:
    pool = Pool(terms=None)
    pool.put("s0", HOT)
    pool.ask_for(HOT, times=50)
    assert pool.look() == []


@pytest.mark.parametrize(
    "change", [{"least_hits": 0}, {"cool_s": 0.0}, {"store_share": 1.5}, {"busy_share": 0.0}]
)
def test_terms_that_cannot_be_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(TERMS, **change)  # type: ignore[arg-type]


PROMPTS = {name: chain(name, 12) for name in ("a", "b")}


EAGER = replace(TERMS, least_hits=2, margin=1.0, store_share=0.015, cool_s=6.0)


class ReplicationMachine(RuleBasedStateMachine):
    """Whatever is asked for, lost, refused or late: no copy is asked for twice, sources have what they are asked for,
    and no drop takes the last replica."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(EAGER)
        self.under_way: list[CopyDue] = []
        self.asked_at: list[float] = []  # of each of them
        self.gone: set[str] = set()

    @initialize()
    def begin(self) -> None:
        for store, name in (("s0", "a"), ("s1", "b")):
            self.pool.put(store, PROMPTS[name])

    @rule(
        name=st.sampled_from(sorted(PROMPTS)),
        length=st.integers(1, 12),
        times=st.sampled_from([1, 5, 30]),
    )
    def ask(self, name: str, length: int, times: int) -> None:
        self.pool.ask_for(PROMPTS[name][:length], times)

    @rule()
    def finish(self) -> None:
        self.pool.finish_all()

    @rule(
        store=st.sampled_from(STORES),
        name=st.sampled_from(sorted(PROMPTS)),
        kept=st.integers(0, 11),
    )
    def evict(self, store: str, name: str, kept: int) -> None:
        if store not in self.gone:
            self.pool.lose(store, PROMPTS[name][kept:][::-1])

    @rule(
        store=st.sampled_from(STORES),
        name=st.sampled_from(sorted(PROMPTS)),
        length=st.integers(1, 12),
    )
    def store_more(self, store: str, name: str, length: int) -> None:
        if store not in self.gone:
            self.pool.put(store, PROMPTS[name][:length])

    @rule(store=st.sampled_from(STORES[1:]))
    def leave(self, store: str) -> None:
        self.gone.add(store)
        self.pool.held[store].clear()
        self.pool.cluster.send(Deregister(instance_id=InstanceId(store), epoch=1))

    @rule(later_s=st.sampled_from([0.5, 1.0, 5.0, 25.0]))
    def look(self, later_s: float) -> None:
        for due in self.pool.look(later_s):
            if isinstance(due, CopyDue):
                self.check_copy(due)
                self.under_way.append(due)
                self.asked_at.append(self.pool.cluster.now)
            else:
                self.check_drop(due)
                self.pool.carry_out(due)

    @rule(name=st.sampled_from(sorted(PROMPTS)))
    def heat_up(self, name: str) -> None:
        self.pool.ask_for(PROMPTS[name], 30)
        self.look(1.0)

    @rule()
    def cool_down(self) -> None:
        self.pool.finish_all()
        self.look(25.0)

    def check_copy(self, due: CopyDue) -> None:
        target = due.target.instance_id
        assert target not in self.gone
        assert not set(due.keys) & set(self.pool.held[target]), "it has them"
        awaited = [
            earlier
            for earlier, at in zip(self.under_way, self.asked_at, strict=True)
            if earlier.target == due.target and self.pool.cluster.now < at + UNDER_WAY_S
        ]
        promised = {key for earlier in awaited for key in earlier.keys}
        assert not set(due.keys) & promised, "they are on their way"
        assert due.saved_s > EAGER.margin * due.cost_s
        for step in due.steps:
            assert set(step.keys) <= set(self.pool.held[step.source.instance_id])
        name = next(n for n, keys in PROMPTS.items() if due.keys[0] in keys)
        first = PROMPTS[name].index(due.keys[0])
        assert due.keys == PROMPTS[name][first : first + len(due.keys)], "parents before children"

    def check_drop(self, due: DropDue) -> None:
        store = due.store.instance_id
        others = set().union(*(self.pool.held[s] for s in STORES if s != store))
        assert set(due.keys) <= others, "the last replica"
        left = set(self.pool.held[store]) - set(due.keys)
        parents = {self.pool.held[store][key] for key in left}
        assert not set(due.keys) & parents, "a block that another one follows"

    @rule(succeeded=st.booleans())
    def settle(self, succeeded: bool) -> None:
        if not self.under_way:
            return
        due = self.under_way.pop(0)
        self.asked_at.pop(0)
        sources = {key: step.source.instance_id for step in due.steps for key in step.keys}
        still = all(key in self.pool.held[sources[key]] for key in due.keys)
        if due.target.instance_id in self.gone or not still or not succeeded:
            self.pool.settle(due, succeeded=False)
        else:
            self.pool.carry_out(due)

    @invariant()
    def the_books_agree_and_keep_their_bound(self) -> None:
        self.pool.cluster.state.validate()
        assert self.pool.cluster.state.num_replicas <= 15 * len(STORES)


TestReplicationMachine = ReplicationMachine.TestCase
TestReplicationMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
