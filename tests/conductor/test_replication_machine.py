"""Replicas in any order of demand, losses, refusals and departures: the pure state, by hypothesis."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from conductor.events import CopyDue, Deregister, DropDue
from kvstore.replication.ledger import UNDER_WAY_S
from protocol.ids import InstanceId
from tests.conductor.cluster import chain
from tests.conductor.replica_pool import STORES, TERMS, Pool
from tests.thoroughness import examples

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
TestReplicationMachine.settings = settings(
    max_examples=examples(12), stateful_step_count=40, deadline=None
)


def test_what_was_dropped_and_copied_again_is_followed_again() -> None:
    """The end of a chain goes and comes back within the time that a drop may take; its beginning goes with it then, or
    stays."""
    machine = ReplicationMachine()
    machine.begin()
    machine.heat_up("b")
    machine.look(0.5)
    machine.look(0.5)
    machine.ask(name="b", length=6, times=30)
    machine.settle(succeeded=True)
    machine.look(25.0)  # the last six are cold
    machine.finish()
    machine.heat_up("b")
    machine.look(0.5)
    machine.settle(succeeded=True)
    machine.finish()
    machine.look(25.0)
    machine.the_books_agree_and_keep_their_bound()
