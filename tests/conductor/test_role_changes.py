"""The conductor tells workers to change their role, from its own books and from heartbeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conductor.events import Action, Load, Phase, RoleChangeDue, Tick
from conductor.limits import Limits
from conductor.policies import make_policy
from conductor.roles.controller import RoleController, RoleTerms
from conductor.roles.loads import BUSY_MEMORY_S, RoleLoads
from conductor.state import ConductorState
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.conductor.cluster import DECODE, Cluster, worker

LIMITS = Limits(ttft_slo_s=30.0, tbt_slo_s=1.0, lease_s=1000.0)
TERMS = RoleTerms(hold_s=1.0, cool_down_s=60.0)


def cluster_of(*, can_switch_role: bool = True, switching: bool = True) -> Cluster:
    """One prefill and three decode workers."""
    cluster = Cluster()
    roles = RoleController(TERMS) if switching else None
    cluster.state = ConductorState(make_policy("global-cache-aware", 1.25), LIMITS, roles)
    for name, role in {
        "p0": Role.PREFILL,
        "d0": Role.DECODE,
        "d1": Role.DECODE,
        "d2": Role.DECODE,
    }.items():
        cluster.join(replace(worker(name, role), can_switch_role=can_switch_role))
        cluster.heartbeat(name, Load(free_blocks=1000))
    return cluster


def overload(cluster: Cluster) -> None:
    """28 s of prompts, of which 27 are left when a need has lasted long enough."""
    for number in range(28):
        cluster.place(f"r{number}", max_tokens=1)


def tick(cluster: Cluster, seconds: int) -> list[RoleChangeDue]:
    actions: list[Action] = []
    for _ in range(seconds):
        actions += cluster.send(Tick())
        cluster.now += 1.0
    return [action for action in actions if isinstance(action, RoleChangeDue)]


def test_a_long_queue_turns_a_decode_worker_into_a_prefill_worker() -> None:
    cluster = cluster_of()
    assert tick(cluster, 5) == []
    overload(cluster)
    (change,) = tick(cluster, 3)
    assert change.role is Role.PREFILL
    assert change.endpoint.instance_id in ("d0", "d1", "d2")
    assert tick(cluster, 3) == []


@pytest.mark.parametrize(
    ("objectives_s", "num_changes"),
    [((), 0), ((0.5,), 0), ((1.5,), 1)],
    ids=["nobody is refused", "what no worker could do", "what another worker could"],
)
def test_prompts_that_are_refused_ask_for_help_though_queues_are_short(
    objectives_s: tuple[float, ...], num_changes: int
) -> None:
    """A queue of 2 s under an objective of 30 keeps the only prefill worker busy; a prompt takes it 1 s."""
    cluster = cluster_of()
    changes: list[RoleChangeDue] = []
    for second in range(60):
        cluster.place(f"r{second}", max_tokens=1)
        cluster.place(f"s{second}", max_tokens=1)
        cluster.report(f"r{second - 1}", Phase.FINISHED)
        cluster.report(f"s{second - 2}", Phase.FINISHED)
        for objective_s in objectives_s:
            cluster.reject(f"t{second}", ttft_slo_s=objective_s)
        changes += tick(cluster, 1)
    assert [change.role for change in changes] == [Role.PREFILL] * num_changes


@pytest.mark.parametrize(
    "built", [{"can_switch_role": False}, {"switching": False}], ids=["fixed workers", "off"]
)
def test_nobody_is_told_who_cannot_or_where_it_is_off(built: dict[str, bool]) -> None:
    cluster = cluster_of(**built)
    overload(cluster)
    assert tick(cluster, 5) == []


def test_full_decode_workers_ask_for_help_that_prefill_workers_may_not_have() -> None:
    """The only prefill worker stays; a second one that has nothing to do helps once that is known."""
    cluster = cluster_of()
    for name in ("d0", "d1", "d2"):
        cluster.heartbeat(name, Load(free_blocks=100))
    assert tick(cluster, 5) == []
    cluster.join(replace(worker("p1", Role.PREFILL), can_switch_role=True))
    cluster.heartbeat("p1")
    assert tick(cluster, 5) == [], "who is new counts as busy"
    (change,) = tick(cluster, 3 * int(BUSY_MEMORY_S))
    assert change.role is Role.DECODE
    assert change.endpoint.instance_id in ("p0", "p1")


def test_a_decode_workers_load_is_its_step_or_its_blocks_whichever_is_nearer_to_the_limit() -> None:
    cluster = cluster_of()
    loads = RoleLoads(cluster.state._members, ttft_slo_s=30.0, tbt_slo_s=1.0)
    cluster.heartbeat("d0", Load(free_blocks=900, num_running=40))  # 10 ms per sequence
    cluster.heartbeat("d1", Load(free_blocks=250, num_running=1))
    found = {load.instance_id: load.need for load in loads.at(cluster.now)}
    assert found["d0"] == pytest.approx(0.4)
    assert found["d1"] == pytest.approx(0.75)
    assert found["d2"] == pytest.approx(0.0)
    loads.validate()


def test_only_what_sequences_add_to_a_step_counts() -> None:
    """0.5 s of a step are there anyway: 40 sequences take 0.4 of the other 0.5 s."""
    cluster = Cluster()
    slow = replace(DECODE, c0=0.5)
    cluster.join(replace(worker("d0", Role.DECODE), decode_profile=slow))
    cluster.heartbeat("d0", Load(free_blocks=1000, num_running=40))
    for tbt_slo_s, need in ((1.0, 0.8), (0.5, 0.0)):
        loads = RoleLoads(cluster.state._members, ttft_slo_s=30.0, tbt_slo_s=tbt_slo_s)
        (found,) = loads.at(cluster.now)
        assert found.need == pytest.approx(need)


def test_a_worker_that_changes_is_the_member_that_it_was_with_another_role() -> None:
    cluster = cluster_of()
    overload(cluster)
    (change,) = tick(cluster, 3)
    name = change.endpoint.instance_id
    cluster.heartbeat(name, Load(free_blocks=1000), draining=True)
    assert tick(cluster, 100) == [], "nothing is decided while one is leaving"
    registration = worker(name, Role.PREFILL)
    later = replace(registration, endpoint=replace(registration.endpoint, epoch=2))
    cluster.join(replace(later, can_switch_role=True))
    roles = {
        view.endpoint.instance_id: view.role
        for view in cluster.state.cluster(cluster.now).instances
    }
    assert roles[name] is Role.PREFILL
    assert len(roles) == 4
    placed = {cluster.place(f"s{i}", max_tokens=1).prefill.instance_id for i in range(4)}
    assert name in placed


def test_terms_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="cool-down"):
        RoleTerms(cool_down_s=-1.0)
