"""Replicas in virtual time: what copies carry and leave behind, failures, and clusters that make and drop them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.events import CopyDue, CopySettled, CopyStep, DropDue
from conductor.replication.planner import COPY_S, ReplicationTerms
from conductor.roles.controller import RoleTerms
from protocol.errors import ConfigError
from protocol.keys import BlockKey
from protocol.request import Endpoint
from tests.thoroughness import examples
from tests.traces.simulator.small import BLOCK, MODEL, request, run_checked, spec
from tests.traces.simulator.test_cluster import SPECS, traces
from traces.format import TraceRecord
from traces.reports.saved import results_to_json
from traces.simulator.machines import PrefillNode
from traces.simulator.network import Network
from traces.simulator.pool import Held, Store
from traces.simulator.replicas import COPIES_AT_ONCE, Replicas
from traces.simulator.results import End
from traces.simulator.run import simulate
from traces.simulator.sampling import key_of
from traces.simulator.spec import ClusterSpec, Fault
from traces.simulator.wakes import Wakes
from traces.simulator.workshop import Workshop

NEAR = pytest.approx
CHAIN = tuple(key_of(number) for number in range(20))
BLOCK_BYTES = BLOCK * MODEL.kv_bytes_per_token  # 4,000
RATE = 10_000.0  # bytes per second of every link: 0.4 s for a block
SOON = ReplicationTerms(least_hits=2, margin=1.0, cool_s=20.0)


class Told:
    """The conductor's ear."""

    def __init__(self) -> None:
        self.settled: list[tuple[Any, int, bool]] = []  # when, which, whether it succeeded

    def handle(self, event: CopySettled, now: float) -> None:
        self.settled.append((now, event.copy_id, event.succeeded))


class Machines:
    """Stores with a network between them, and nobody else."""

    def __init__(
        self,
        num_machines: int = 3,
        num_blocks: int = 100,
        num_disk_blocks: int = 0,
        rate: float = RATE,
        disk_rate: float = RATE,
    ) -> None:
        shape = spec(num_prefill=num_machines)
        workshop = Workshop(shape, None, lambda _: 0, lambda _: None)  # type: ignore[arg-type]
        self.nodes = [
            PrefillNode(
                name=f"prefill-{number}",
                machine=None,  # type: ignore[arg-type]
                store=Store(num_blocks, num_disk_blocks, "lru"),
            )
            for number in range(num_machines)
        ]
        links = workshop.links(self.nodes)
        rates = {link: disk_rate if link.endswith("disk") else rate for link in links}
        self.network, self.told = Network(rates), Told()
        stores = {node.store_id: node for node in self.nodes}
        self.replicas = Replicas(
            self.network,
            stores,
            self.told,  # type: ignore[arg-type]
            Wakes(),
            BLOCK_BYTES,
        )
        self.reads: list[list[Held]] = [[] for _ in self.nodes]  # of others
        self.num_asked = 0

    def copy(
        self, target: int, *steps: tuple[int, Sequence[BlockKey]], now: float = 0.0
    ) -> CopyDue:
        self.num_asked += 1
        due = CopyDue(
            copy_id=self.num_asked,
            target=self.endpoint(target),
            steps=tuple(
                CopyStep(source=self.endpoint(source), keys=tuple(keys)) for source, keys in steps
            ),
            saved_s=1.0,
            cost_s=0.1,
        )
        self.replicas.begin(due, now)
        self.validate()
        return due

    def drop(self, store: int, keys: Sequence[BlockKey]) -> None:
        self.replicas.begin(DropDue(store=self.endpoint(store), keys=tuple(keys)), 0.0)
        self.validate()

    def endpoint(self, number: int) -> Endpoint:
        return self.nodes[number].endpoint(self.nodes[number].store_id)

    def run(self, until: float = 1e9) -> None:
        while (at := self.network.wake_at) is not None and at <= until:
            for flow in self.network.advance(at):
                self.replicas.flow_ended(flow, at)
            self.validate()

    def kill(self, number: int, now: float) -> None:
        self.nodes[number].is_alive = False
        self.replicas.died(self.nodes[number], now)
        self.validate()

    def validate(self) -> None:
        self.network.validate()
        self.replicas.validate()
        for node, reads in zip(self.nodes, self.reads, strict=True):
            node.store.validate(self.replicas.held_at(node) + reads)

    def have(self, number: int, keys: Sequence[BlockKey] = CHAIN) -> int:
        return self.nodes[number].store.prefix(keys)


# -- copies


def test_a_copy_takes_as_long_as_its_bytes_and_is_there_when_they_are() -> None:
    machines = Machines()
    machines.nodes[0].store.put(CHAIN[:5], 0)
    due = machines.copy(1, (0, CHAIN[:5]))
    machines.run(until=1.9)
    assert machines.have(1) == 0
    machines.run()
    assert machines.have(1) == machines.have(0) == 5
    assert machines.told.settled == [(NEAR(2.0), due.copy_id, True)]
    found = machines.replicas.counters
    assert (found["copies"], found["replicas_made"]) == (1, 5)
    assert found["bytes_copied"] == machines.network.bytes_carried == 5 * BLOCK_BYTES


def test_a_small_copy_takes_the_time_of_its_calls() -> None:
    machines = Machines(rate=1e9)
    machines.nodes[0].store.put(CHAIN[:1], 0)
    machines.copy(1, (0, CHAIN[:1]))
    machines.run()
    assert machines.told.settled == [(NEAR(COPY_S), 1, True)]


def test_steps_follow_each_other_each_from_its_own_source() -> None:
    machines = Machines()
    machines.nodes[0].store.put(CHAIN[:5], 0)
    machines.nodes[1].store.put(CHAIN[:10], 0)
    machines.copy(2, (0, CHAIN[:5]), (1, CHAIN[5:10]))
    machines.run(until=2.0)
    assert machines.have(2) == 5
    machines.run()
    assert machines.have(2) == 10
    assert machines.told.settled == [(NEAR(4.0), 1, True)]


def test_copies_share_their_sources_link_and_take_turns_at_their_target() -> None:
    """Two stores copy from the same one, at half its rate; a second copy into one of them begins after its first."""
    machines = Machines()
    machines.nodes[0].store.put(CHAIN, 0)
    machines.copy(1, (0, CHAIN[:5]))
    machines.copy(2, (0, CHAIN[:5]))
    machines.copy(1, (0, CHAIN[5:10]))
    machines.run()
    assert machines.told.settled == [
        (NEAR(4.0), 1, True),
        (NEAR(4.0), 2, True),
        (NEAR(6.0), 3, True),
    ]


def test_no_more_copies_than_so_many_run_at_once() -> None:
    machines = Machines(num_machines=COPIES_AT_ONCE + 3)
    machines.nodes[0].store.put(CHAIN[:1], 0)
    for target in range(1, COPIES_AT_ONCE + 3):
        machines.copy(target, (0, CHAIN[:1]))
        assert len(machines.network) == min(target, COPIES_AT_ONCE)
    machines.run()
    assert all(machines.have(target) == 1 for target in range(COPIES_AT_ONCE + 3))


def test_what_the_target_has_already_is_not_carried() -> None:
    machines = Machines()
    machines.nodes[0].store.put(CHAIN[:5], 0)
    machines.nodes[1].store.put(CHAIN[:3], 0)
    machines.copy(1, (0, CHAIN[:5]))
    machines.run()
    assert machines.told.settled == [(NEAR(0.8), 1, True)]
    machines.copy(1, (0, CHAIN[:5]), now=5.0)
    assert machines.told.settled[-1] == (5.0, 2, True), "there was nothing to do"


def test_what_lies_on_the_sources_disk_comes_from_there() -> None:
    """Of three blocks one is on disk, whose link is a tenth as fast: 4 s instead of 1.2."""
    machines = Machines(num_blocks=2, num_disk_blocks=5, disk_rate=RATE / 10)
    machines.nodes[0].store.put(CHAIN[:3], 0)
    machines.copy(1, (0, CHAIN[:3]))
    machines.run()
    assert machines.told.settled == [(NEAR(4.0), 1, True)]


# -- failures


def test_a_copy_of_which_the_source_has_lost_the_end_brings_the_beginning_and_fails() -> None:
    machines = Machines()
    machines.nodes[0].store.put(CHAIN[:3], 0)
    machines.copy(1, (0, CHAIN[:5]))
    machines.copy(2, (0, CHAIN[5:]))
    machines.run()
    assert machines.have(1) == 3
    assert machines.told.settled == [(0.0, 2, False), (NEAR(1.2), 1, False)]


@pytest.mark.parametrize("victim", [1, 2])
def test_a_copy_ends_with_its_source_or_target_and_keeps_what_earlier_steps_brought(
    victim: int,
) -> None:
    """Node 2 copies five blocks from 0 and then five from 1; one of the two dies in the second step."""
    machines = Machines()
    machines.nodes[0].store.put(CHAIN[:5], 0)
    machines.nodes[1].store.put(CHAIN[:10], 0)
    machines.copy(2, (0, CHAIN[:5]), (1, CHAIN[5:10]))
    machines.run(until=2.0)
    machines.kill(victim, 3.0)
    assert machines.told.settled == [(3.0, 1, False)]
    assert len(machines.network) == 0
    assert machines.have(2) == 5
    assert machines.replicas.counters["copies_failed"] == 1


def test_a_copy_that_waited_fails_where_its_machine_has_begun_another_life() -> None:
    machines = Machines()
    machines.nodes[0].store.put(CHAIN[:5], 0)
    machines.nodes[1].store.put(CHAIN[:10], 0)
    machines.copy(2, (0, CHAIN[:5]))
    machines.copy(2, (1, CHAIN[5:10]))
    machines.nodes[1].epoch += 1
    machines.run()
    assert machines.told.settled == [(NEAR(2.0), 1, True), (NEAR(2.0), 2, False)]


def test_a_copy_for_which_there_is_no_room_fails() -> None:
    """All that the target has is being read, but for one block."""
    machines = Machines(num_blocks=3)
    machines.nodes[0].store.put(CHAIN[:3], 0)
    machines.nodes[1].store.put(CHAIN[10:13], 0)
    machines.reads[1].append(machines.nodes[1].store.hold(CHAIN[10:12]))
    machines.copy(1, (0, CHAIN[:3]))
    machines.run()
    assert machines.told.settled == [(NEAR(1.2), 1, False)]
    assert machines.have(1) == machines.replicas.counters["replicas_made"] == 1
    assert machines.nodes[1].store.num_refused == 1


# -- drops


def test_a_drop_takes_the_replicas_and_counts_those_that_nobody_else_had() -> None:
    machines = Machines()
    machines.nodes[0].store.put(CHAIN[:5], 0)
    machines.nodes[1].store.put(CHAIN[:6], 0)
    machines.drop(1, CHAIN[6:2:-1])
    assert machines.have(1) == 3
    assert machines.replicas.counters["replicas_dropped"] == 3
    assert machines.replicas.counters["last_replicas_dropped"] == 1, "of number 5"


def test_what_is_dropped_while_it_is_read_still_arrives() -> None:
    machines = Machines()
    machines.nodes[0].store.put(CHAIN[:5], 0)
    machines.nodes[1].store.put(CHAIN[:5], 0)
    machines.copy(2, (0, CHAIN[:5]))
    machines.drop(0, CHAIN[4::-1])
    assert machines.have(0) == 0
    machines.run()
    assert machines.have(2) == 5
    assert machines.nodes[0].store.num_free == 100


def test_a_machine_that_died_drops_nothing() -> None:
    machines = Machines()
    machines.nodes[0].is_alive = False
    machines.drop(0, CHAIN[:1])
    assert machines.replicas.counters["drops_failed"] == 1


# -- a whole cluster


def hot(
    count: int, every_s: float, begins_at: float = 0.0, num_tokens: int = 150
) -> list[TraceRecord]:
    """Prompts of which the first ten blocks, 1 s, are shared."""
    shared = list(range(10))
    return [
        request(begins_at + number * every_s, num_tokens, 2, shared, base=100 * (number + 1))
        for number in range(count)
    ]


def test_what_prompts_waited_for_is_copied_and_goes_again_when_it_is_cold() -> None:
    """A policy that never fetches sends all to one machine, where no block follows on the shared ones. The replica is
    dropped while others' prompts go on."""
    first, burst = hot(1, 0.0, num_tokens=109), hot(40, 0.02, begins_at=2.0, num_tokens=109)
    others = [request(20.0 + number, 20, 2, base=10_000 + 10 * number) for number in range(60)]
    shape = spec(num_prefill=3, policy="session-affinity", replication=SOON)
    cluster, journeys = run_checked(shape, [*first, *burst, *others])
    assert {journey.end for journey in journeys} == {End.COMPLETED}
    found = cluster.counters
    assert found["copies"] >= 1
    assert found["copies_failed"] == 0
    assert found["replicas_made"] == found["replicas_dropped"] > 0
    assert found["last_replicas_dropped"] == 0
    assert found["bytes_copied"] == found["replicas_made"] * BLOCK_BYTES
    assert any(node.store.prefix(journeys[0].keys) == 10 for node in cluster.prefills)


def test_a_cluster_whose_stores_copy_nothing_counts_no_replicas() -> None:
    result = simulate(spec(num_prefill=3, policy="session-affinity"), hot(20, 0.4))
    assert "copies" not in result.counters


def test_replicas_nobody_could_read_are_refused() -> None:
    with pytest.raises(ConfigError, match="--pool"):
        spec(pool="local", replication=SOON).check()


def test_machines_may_change_their_roles_meanwhile() -> None:
    roles = RoleTerms(hold_s=2.0, cool_down_s=10.0)
    shape = spec(num_prefill=1, num_decode=3, ttft_slo_s=10.0, roles=roles, replication=SOON)
    cluster, journeys = run_checked(shape, hot(80, 0.3))
    assert {journey.end for journey in journeys} == {End.COMPLETED}
    assert cluster.counters["role_changes"] >= 1


SHARED = SPECS.filter(lambda each: each.pool == "global").map(
    lambda each: replace(each, replication=SOON)
)
POLICIES = st.sampled_from(["global-cache-aware", "moonserve", "session-affinity"])


@settings(deadline=None, max_examples=examples(10))
@given(spec=SHARED, policy=POLICIES, every_s=st.floats(0.01, 0.4), records=traces())
def test_nothing_leaks_whatever_is_copied_and_whoever_dies(
    spec: ClusterSpec, policy: str, every_s: float, records: list[TraceRecord]
) -> None:
    """Any cluster and faults with a hot prompt among others, with every proof after every event; done again, it is the
    same to the byte."""
    shape = replace(spec, policy=policy)
    mixed = sorted([*records, *hot(12, every_s, 1.0)], key=lambda record: record.arrived_s)
    cluster, journeys = run_checked(shape, mixed)
    assert all(journey.end is not None for journey in journeys)
    assert len(cluster.network) == 0
    assert all(not cluster.replicas.held_at(node) for node in cluster.prefills)
    again = [replace(simulate(shape, mixed), wall_s=0.0) for _ in range(2)]
    assert results_to_json(again[:1]) == results_to_json(again[1:])


def test_a_copy_outlasts_the_machine_that_it_was_made_from() -> None:
    """The machine to which the burst went dies. Where nothing was copied, the next prompt finds no prefix."""
    burst = [*hot(1, 0.0, num_tokens=109), *hot(20, 0.02, begins_at=2.0, num_tokens=109)]
    records = [*burst, *hot(5, 0.4, begins_at=30.0)]
    faults = (Fault(instance="prefill-0", at_s=12.0),)
    cached = {}
    for terms in (None, SOON):
        shape = spec(num_prefill=3, policy="session-affinity", replication=terms, faults=faults)
        _, journeys = run_checked(shape, records)
        assert {journey.end for journey in journeys} == {End.COMPLETED}
        cached[terms] = sum(journey.cached_tokens for journey in journeys[len(burst) :])
    assert cached[SOON] == cached[None] + 100
