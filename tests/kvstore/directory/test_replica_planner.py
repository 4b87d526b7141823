"""Plans of the replication planner, on directories to which the plans are applied, and the counts of `Heat`."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonserve.kvstore.directory import Changes, Directory
from moonserve.kvstore.directory.heat import NUM_SLICES, Heat
from moonserve.kvstore.directory.replica_planner import KEYS_PER_STEP, ReplicaPlanner
from moonserve.kvstore.directory.replica_plans import NO_PINS, NodeView, PinnedReplicas, ReplicaCopy, ReplicaDrop
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey, pack_keys
from moonserve.protocol.request import InstanceId
from tests.kvstore.node.nodes import key
from tests.thoroughness import any_order, examples

HITS = 8
COOL_S = 60.0
EXTRA = 2


class Cluster:
    """Nodes by name, and a planner over them. A block's parent has the number before; multiples of 1000 have none."""

    def __init__(self, **hosts: str) -> None:
        self.directory = Directory()
        self.heat = Heat(threshold=HITS, window_s=10.0)
        self.planner = ReplicaPlanner(self.directory, self.heat, extra_replicas=EXTRA, cool_s=COOL_S)
        self.nodes = {
            name: NodeView(instance_id=name, host=host, free_bytes=50, capacity_bytes=100)
            for name, host in zip(map(InstanceId, hosts), hosts.values(), strict=True)
        }
        self.now = 1000.0

    def change(self, name: str, **fields: object) -> None:
        known = self.nodes[InstanceId(name)]
        self.nodes[InstanceId(name)] = replace(known, **fields)  # type: ignore[arg-type]

    def hold(self, name: str, numbers: Iterable[int]) -> None:
        held = list(numbers)
        parents = [key(n - 1) if n % 1000 else NO_PARENT for n in held]
        changes = Changes(added=pack_keys([key(n) for n in held]), parents=pack_keys(parents))
        self._take(name, changes)

    def _take(self, name: str, changes: Changes) -> None:
        seq = max(1, self.directory.next_seq(InstanceId(name)))
        assert self.directory.apply_changes(InstanceId(name), 1, changes, seq, seq + 1, snapshot=False)

    def read(self, *numbers: int, times: int = HITS) -> None:
        self.heat.record(pack_keys([key(n) for n in numbers] * times), self.now)

    def plan(self, pins: PinnedReplicas = NO_PINS) -> tuple[tuple[ReplicaCopy, ...], tuple[ReplicaDrop, ...]]:
        plan = self.planner.plan(self.nodes, self.now, pins)
        return plan.copies, plan.drops

    def carry_out(self, copy: ReplicaCopy, *, succeeded: bool = True) -> None:
        if succeeded:
            self.hold(copy.target, numbers(copy.keys))
        self.planner.copy_ended(copy, succeeded=succeeded, now=self.now)

    def remove(self, drop: ReplicaDrop) -> None:
        self._take(drop.node, Changes(removed=pack_keys(drop.keys)))

    def holders(self, number: int) -> set[str]:
        return set(self.directory.holders(key(number)))


def numbers(keys: Iterable[BlockKey]) -> list[int]:
    return [int.from_bytes(block, "little") - 1 for block in keys]


@pytest.mark.parametrize(
    ("nodes", "held", "copied"),
    [  # host and free bytes by node; length of the chain held by node
        ({"a": ("h1", 50), "b": ("h1", 100), "c": ("h2", 10), "d": ("h2", 60)}, {"a": 5}, ("d", [0, 1, 2, 3, 4])),
        ({"a": ("h1", 50), "b": ("h1", 50)}, {"a": 5}, ("b", [0, 1, 2, 3, 4])),
        ({"a": ("h1", 50), "b": ("h1", 50), "c": ("h2", 50)}, {"a": 5, "b": 3, "c": 2}, ("c", [2, 3, 4])),
        ({"a": ("h1", 50), "drains": ("h2", 50), "lost": ("h3", 50)}, {"a": 5}, None),
    ],
    ids=[
        "a whole chain, to the least-used node of another host",
        "where there is one host, another node of it will do",
        "only what the target lacks",
        "nodes that drain or are out of step take nothing",
    ],
)
def test_a_hot_chain_goes_to_the_emptiest_node_of_another_host(
    nodes: dict[str, tuple[str, int]], held: dict[str, int], copied: tuple[str, list[int]] | None
) -> None:
    cluster = Cluster(**{name: host for name, (host, _) in nodes.items()})
    for name, (_, free) in nodes.items():
        cluster.change(name, free_bytes=free, draining=name == "drains", in_step=name != "lost")
    for name, length in held.items():
        cluster.hold(name, range(length))
    cluster.read(3, 4)
    copies, drops = cluster.plan()
    assert drops == ()
    assert [(copy.target, numbers(copy.keys)) for copy in copies] == [copied] * (copied is not None)
    assert all(step.source == "a" for copy in copies for step in copy.steps)


def test_a_block_gains_at_most_two_replicas_with_a_pause_between_them() -> None:
    cluster = Cluster(a="h1", b="h2", c="h3", d="h4")
    cluster.hold("a", [0])
    targets = []
    for _ in range(4):
        cluster.read(0)
        copies, _ = cluster.plan()
        for copy in copies:
            cluster.carry_out(copy)
            targets.append(copy.target)
        cluster.read(0)
        assert cluster.plan()[0] == ()  # still as hot, but resting
        cluster.now += COOL_S - 1
        cluster.read(0)
        cluster.now += 1
    assert len(targets) == EXTRA
    assert cluster.holders(0) == {"a", *targets}


def test_a_copy_that_failed_is_planned_again_at_once_with_another_node() -> None:
    cluster = Cluster(a="h1", b="h2", c="h3")
    cluster.hold("a", [0])
    cluster.read(0)
    [first], _ = cluster.plan()
    cluster.carry_out(first, succeeded=False)
    [second], _ = cluster.plan()
    assert {first.target, second.target} == {"b", "c"}


def test_a_long_chain_goes_in_steps_parents_first() -> None:
    cluster = Cluster(a="h1", b="h2")
    cluster.hold("a", range(3 * KEYS_PER_STEP - 1))
    cluster.read(3 * KEYS_PER_STEP - 2)
    [copy], _ = cluster.plan()
    assert numbers(copy.keys) == list(range(3 * KEYS_PER_STEP - 1))
    assert all(len(step.keys) <= KEYS_PER_STEP for step in copy.steps)


def test_a_replica_made_for_heat_is_dropped_children_first_when_nobody_read_it_for_long() -> None:
    cluster = Cluster(a="h1", b="h2")
    cluster.hold("a", range(3))
    cluster.read(2)
    [copy], _ = cluster.plan()
    cluster.carry_out(copy)
    cluster.now += COOL_S - 1
    cluster.read(0, 1, 2, times=1)
    cluster.now += COOL_S - 1
    assert cluster.plan() == ((), ())
    cluster.now += 1
    _, [drop] = cluster.plan()
    assert (drop.node, numbers(drop.keys)) == ("b", [2, 1, 0])
    assert cluster.plan() == ((), ())


def test_a_replica_request_includes_ancestors_and_reports_missing_keys() -> None:
    cluster = Cluster(a="h1", b="h2", c="h3")
    cluster.hold("a", range(4))
    plan = cluster.planner.plan_change([key(3), key(77)], 3, cluster.nodes, cluster.now)
    assert {copy.target for copy in plan.copies} == {"b", "c"}
    assert all(numbers(copy.keys) == [0, 1, 2, 3] for copy in plan.copies)
    assert plan.missing == 1


def test_replicas_go_to_nodes_that_hold_the_head() -> None:
    cluster = Cluster(a="h1", b="h2", c="h3")
    cluster.change("c", free_bytes=100)
    cluster.hold("a", range(4))
    cluster.hold("b", range(2))
    plan = cluster.planner.plan_change([key(3)], 2, cluster.nodes, cluster.now)
    [copy] = plan.copies
    assert (copy.target, numbers(copy.keys)) == ("b", [2, 3])


def pins_of(**pinned: list[int]) -> PinnedReplicas:
    return PinnedReplicas(pinned={InstanceId(n): frozenset(key(b) for b in blocks) for n, blocks in pinned.items()})


UNKNOWN_B = PinnedReplicas(
    pinned=pins_of(a=[0, 1]).pinned | pins_of(c=[0, 1]).pinned, unknown=frozenset({InstanceId("b")})
)


@pytest.mark.parametrize(
    ("pins", "dropped"),
    [
        *((NO_PINS, "ab"), (UNKNOWN_B, ""), (pins_of(a=[1]), "bc")),
        *((pins_of(a=[0, 1]), "bc"), (pins_of(a=[0, 1], b=[0, 1]), "ca")),
    ],
)
def test_fewer_replicas_leave_the_fullest_nodes_first_and_pinned_ones_last(pins: PinnedReplicas, dropped: str) -> None:
    """The last replica and replicas of a node with unknown pins are never dropped; children are dropped first."""
    cluster = Cluster(a="h1", b="h2", c="h3")
    for name, free in (("a", 10), ("b", 20), ("c", 90)):
        cluster.change(name, free_bytes=free)
        cluster.hold(name, range(2))
    plan = cluster.planner.plan_change([key(0), key(1)], 1, cluster.nodes, cluster.now, pins)
    assert [(drop.node, numbers(drop.keys)) for drop in plan.drops] == [(node, [1, 0]) for node in dropped]


class AnyHistory(RuleBasedStateMachine):
    """Random reads, copies, drops, losses and returns of three chains over five nodes on three hosts."""

    names = st.sampled_from(["a", "b", "c", "d", "e"])
    blocks = st.sampled_from([*range(5), *range(1000, 1004), 2000])

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(a="h1", b="h1", c="h2", d="h2", e="h3")
        self.under_way: list[ReplicaCopy] = []
        self.planned_at: dict[int, float] = {}  # by identity, for all copies ever planned
        self.made: set[tuple[str, int]] = set()

    @rule(name=names, block=blocks)
    def a_worker_puts_a_chain(self, name: str, block: int) -> None:
        self.cluster.hold(name, range(block // 1000 * 1000, block + 1))

    @rule(block=blocks)
    def a_chain_is_read_often(self, block: int) -> None:
        self.cluster.read(*range(block // 1000 * 1000, block + 1))

    @rule(seconds=st.sampled_from([0.5, 5.0, 30.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        """Advances the clock. Copies planned more than 60 s ago fail, as a copy's deadline would end them."""
        self.cluster.now += seconds
        for copy in [c for c in self.under_way if self.cluster.now - self.planned_at[id(c)] > 60.0]:
            self.under_way.remove(copy)
            self.cluster.carry_out(copy, succeeded=False)

    @rule(pinned=st.sets(st.tuples(names, blocks), max_size=20))
    def plans(self, pinned: set[tuple[str, int]]) -> None:
        before = {n: self.cluster.holders(n) for n in [*range(5), *range(1000, 1004), 2000]}
        pins = pins_of(**{name: [n for who, n in pinned if who == name] for name in "abcde"})
        copies, drops = self.cluster.plan(pins)
        for copy in copies:
            self._check_copy(copy, before)
        self.under_way += copies
        self.planned_at.update((id(copy), self.cluster.now) for copy in copies)
        for drop in drops:
            self._check_drop(drop, pinned)
            self.cluster.remove(drop)

    def _check_copy(self, copy: ReplicaCopy, before: dict[int, set[str]]) -> None:
        ordered = numbers(copy.keys)
        assert ordered == sorted(ordered), "a child before its parent"
        for n in ordered:
            arriving = {c.target for c in self.under_way if n in numbers(c.keys)}
            assert copy.target not in before[n]
            assert len(before[n] | arriving) < 1 + EXTRA, "above the limit"
        self.made |= {(copy.target, n) for n in ordered}
        assert all(step.source in before[n] for step in copy.steps for n in numbers(step.keys))

    def _check_drop(self, drop: ReplicaDrop, pinned: set[tuple[str, int]]) -> None:
        gone = numbers(drop.keys)
        assert gone == sorted(gone, reverse=True) or len({n // 1000 for n in gone}) > 1
        for n in gone:
            others = self.cluster.holders(n) - {drop.node}
            assert others, "the last replica"
            assert (drop.node, n) in self.made, "heat did not make it"
            spared = (drop.node, n) not in pinned or all((who, n) in pinned for who in others)
            assert spared, "a replica with a pin before one without"
            follower = n + 1
            if follower % 1000 and drop.node in self.cluster.holders(follower):
                assert follower in gone[: gone.index(n)], "a follower stays behind"

    @rule(succeeded=st.booleans(), data=st.data())
    def a_copy_ends(self, succeeded: bool, data: st.DataObject) -> None:
        if self.under_way:
            index = data.draw(st.integers(0, len(self.under_way) - 1))
            self.cluster.carry_out(self.under_way.pop(index), succeeded=succeeded)

    @rule(name=names)
    def a_node_is_lost(self, name: str) -> None:
        self.cluster.directory.drop(InstanceId(name))

    @invariant()
    def the_index_is_sound(self) -> None:
        self.cluster.directory.validate()


TestAnyHistory = any_order(AnyHistory, 40)


def test_the_least_read_blocks_are_dropped_at_the_limit_of_counts() -> None:
    heat = Heat(threshold=3, max_keys=100)
    heat.record(b"".join(key(n) * 3 for n in range(10)), 0.0)
    for batch in range(20):
        heat.record(b"".join(key(1_000 + 50 * batch + n) for n in range(50)), 0.1 * batch)
        assert len(heat) <= 100
        heat.validate()
    assert sorted(heat.hot(2.0)) == sorted(key(n) for n in range(10))


def test_the_last_read_of_a_watched_block_is_remembered_beyond_the_window() -> None:
    heat = Heat()
    heat.watch(key(1), 5.0)
    assert heat.last_hit_at(key(1)) == 5.0
    heat.record(key(1) + key(2), 8.0)
    heat.record(key(2), 300.0)
    assert heat.last_hit_at(key(1)) == 8.0
    heat.unwatch(key(1))
    heat.unwatch(key(1))


def test_a_clock_that_goes_back_keeps_the_counts_of_hits() -> None:
    heat = Heat(threshold=2, window_s=10.0)
    heat.record(key(1), 50.0)
    heat.record(key(1), 20.0)
    assert heat.hits(key(1), 50.0) == 2
    heat.validate()


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 3), st.integers(1, 5)), max_size=60))
@settings(max_examples=examples(50), deadline=None)
def test_counts_equal_a_list_of_all_reads(steps: list[tuple[float, int, int]]) -> None:
    """Counts equal a list of all reads in the window's slices; keys that are no longer read are dropped."""
    window_s = 10.0
    slice_s = window_s / NUM_SLICES
    heat = Heat(threshold=4, window_s=window_s)
    reads: deque[tuple[int, int]] = deque()
    now = 0.0
    for pause, number, count in steps:
        now += pause
        heat.record(key(number) * count, now)
        reads.extend([(int(now // slice_s), number)] * count)
        first = int(now // slice_s) - NUM_SLICES + 1
        recent = [n for at, n in reads if at >= first]
        for n in range(4):
            assert heat.hits(key(n), now) == recent.count(n)
        hot = [n for n in range(4) if recent.count(n) >= 4]
        assert heat.hot(now) == [key(n) for n in sorted(hot, key=lambda n: (-recent.count(n), n))]
        heat.validate()
    assert heat.hot(now + 2 * window_s) == []
    assert len(heat) == 0
