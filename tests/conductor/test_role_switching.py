"""Tests of role changes: workers help the role in need without oscillation, and the conductor notifies them."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.conductor.events import Action, Load, RoleChangeDue, Tick
from moonserve.conductor.role_switching import BUSY_MEMORY_S, RoleController, RoleLoads, RoleThresholds, WorkerLoad
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import InstanceId, RequestPhase, Role
from tests.conductor.cluster import DECODE, Cluster, worker

TERMS = RoleThresholds(high=0.7, low=0.5, hold_s=10.0, cool_down_s=60.0)
NEAR = pytest.approx


def load(name: str, role: Role, use: float, **changes: Any) -> WorkerLoad:
    usual = {"can_change": True, "draining": False, "need": use}
    return WorkerLoad(instance_id=InstanceId(name), role=role, use=use, **usual | changes)


def prefills(*uses: float) -> list[WorkerLoad]:
    return [load(f"p{i}", Role.PREFILL, use) for i, use in enumerate(uses)]


def decodes(*uses: float, can_change: bool = True) -> list[WorkerLoad]:
    return [load(f"d{i}", Role.DECODE, use, can_change=can_change) for i, use in enumerate(uses)]


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [  # shown unchanged until a decision is due
        ([*prefills(0.9), *decodes(0.3, 0.1, 0.2)], "d1"),  # the least used worker of the other role
        ([*prefills(0.1, 0.2), *decodes(0.8)], "p0"),
        # No change that would leave the helping role above the lower threshold.
        ([*prefills(0.9), *decodes(0.26, 0.26)], None),
        ([*prefills(0.9), *decodes(0.25, 0.25)], "d0"),
        ([*prefills(5.0), *decodes(0.0)], None),  # the last worker of a role keeps it
        ([*prefills(0.9), *decodes(0.0, can_change=False), load("d1", Role.DECODE, 0.1)], "d1"),
        ([*prefills(0.9), *decodes(0.0, 0.0, can_change=False)], None),
        ([load("p0", Role.PREFILL, 1.0, need=0.1), *decodes(0.0, 0.0)], None),  # in use, but not in need
        ([*prefills(0.9), *decodes(0.0, 0.0), load("x", Role.DECODE, 0.0, draining=True)], None),
    ],
)
def test_which_worker_changes_its_role(loads: list[WorkerLoad], chosen: str | None) -> None:
    controller = RoleController(TERMS)
    assert controller.decide(loads, 0.0) is None
    change = controller.decide(loads, TERMS.hold_s)
    assert (None if change is None else change.instance_id) == chosen
    # The next change waits until the last one can have taken effect.
    assert controller.decide(loads, TERMS.hold_s + TERMS.cool_down_s - 1) is None
    again = controller.decide(loads, 2 * TERMS.hold_s + TERMS.cool_down_s)
    assert again == change


def test_short_need_changes_no_role() -> None:
    controller = RoleController(TERMS)
    needy, content = [*prefills(0.9), *decodes(0.0, 0.0)], [*prefills(0.6), *decodes(0.0, 0.0)]
    for round_at in range(0, 100, 10):
        assert controller.decide(needy, round_at) is None
        assert controller.decide(needy, round_at + 9.9) is None
        assert controller.decide(content, round_at + 9.95) is None


@pytest.mark.parametrize("values", [{"low": 0.8}, {"low": 0.0}, {"hold_s": -1.0}, {"cool_down_s": -1.0}])
def test_thresholds_that_would_oscillate_are_rejected(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RoleThresholds(**values)


SHARES = st.floats(0.0, 3.0)
ANYBODY = st.builds(
    load,
    st.uuids().map(str),
    st.sampled_from([Role.PREFILL, Role.DECODE]),
    SHARES,
    need=SHARES,
    can_change=st.booleans(),
)


@given(st.lists(st.lists(ANYBODY, max_size=5), max_size=12))
def test_each_role_keeps_a_worker_and_only_able_workers_change(rounds: list[list[WorkerLoad]]) -> None:
    controller = RoleController(RoleThresholds(hold_s=0.0, cool_down_s=0.0))
    for number, loads in enumerate(rounds):
        change = controller.decide(loads, float(number))
        controller.validate()
        if change is None:
            continue
        (chosen,) = (each for each in loads if each.instance_id == change.instance_id)
        assert chosen.can_change
        assert chosen.role is not change.role
        assert sum(each.role is chosen.role for each in loads) >= 2
        assert any(each.role is change.role for each in loads)


class Fluid:
    """A fluid model of a cluster under constant load: work is shared evenly, and excess work queues."""

    def __init__(self, num_prefill: int, num_decode: int, prompts: float, answers: float) -> None:
        names = [f"w{i}" for i in range(num_prefill + num_decode)]
        self.roles = {name: Role.PREFILL if i < num_prefill else Role.DECODE for i, name in enumerate(names)}
        self._prompts, self._answers = prompts, answers  # in units of one worker's capacity
        # Queue of each prefill worker as a share of the target. At 1 it is full, and requests are rejected.
        self._queue = 0.0
        self.changes: Counter[str] = Counter()

    def count(self, role: Role) -> int:
        return sum(each is role for each in self.roles.values())

    def loads(self) -> list[WorkerLoad]:
        busy = min(self._prompts / self.count(Role.PREFILL), 1.0)
        decode = self._answers / self.count(Role.DECODE)
        return [
            load(name, role, max(self._queue, busy), need=self._queue)
            if role is Role.PREFILL
            else load(name, role, decode)
            for name, role in self.roles.items()
        ]

    def settle(self) -> None:
        controller = RoleController(TERMS)
        for second in range(1_500):
            change = controller.decide(self.loads(), float(second))
            if change is not None:
                self.roles[change.instance_id] = change.role
                self.changes[change.instance_id] += 1
            excess = self._prompts / self.count(Role.PREFILL) - 1.0
            self._queue = min(max(self._queue + excess / 30.0, 0.0), 1.0)


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.0, 8.0), st.floats(0.0, 8.0))
def test_constant_load_changes_no_worker_twice(
    num_prefill: int, num_decode: int, prompts: float, answers: float
) -> None:
    cluster = Fluid(num_prefill, num_decode, prompts, answers)
    cluster.settle()
    assert min(cluster.count(Role.PREFILL), cluster.count(Role.DECODE)) >= 1
    assert all(times == 1 for times in cluster.changes.values())


def test_a_cluster_that_has_enough_workers_balances() -> None:
    """Seven workers, of which 3.8 are needed for prefill and 0.5 for decode, reach balance from one prefill worker."""
    cluster = Fluid(1, 6, prompts=3.8, answers=0.5)
    cluster.settle()
    assert cluster.count(Role.PREFILL) >= 4
    assert max(each.need for each in cluster.loads()) < TERMS.high


def cluster_of(*, can_switch_role: bool = True, switching: bool = True) -> Cluster:
    """Returns a cluster of one prefill and three decode workers."""
    roles = RoleController(RoleThresholds(hold_s=1.0, cool_down_s=60.0)) if switching else None
    cluster = Cluster(roles=roles, ttft_slo_s=30.0, tbt_slo_s=1.0, lease_s=1000.0)
    for name in ("p0", "d0", "d1", "d2"):
        role = Role.PREFILL if name == "p0" else Role.DECODE
        cluster.join(worker(name, role, can_switch_role=can_switch_role))
        cluster.heartbeat(name, Load(free_blocks=1000))
    return cluster


def overload(cluster: Cluster) -> None:
    """Places 28 s of prompts. 27 s are left when the need has lasted long enough."""
    for number in range(28):
        cluster.place(f"r{number}", max_tokens=1)


def tick(cluster: Cluster, seconds: int) -> list[RoleChangeDue]:
    actions: list[Action] = []
    for _ in range(seconds):
        actions += cluster.send(Tick())
        cluster.now += 1.0
    return [action for action in actions if isinstance(action, RoleChangeDue)]


def test_a_long_queue_turns_a_decode_worker_into_a_prefill_worker_with_another_epoch() -> None:
    cluster = cluster_of()
    assert tick(cluster, 5) == []
    overload(cluster)
    (change,) = tick(cluster, 3)
    name = change.endpoint.instance_id
    assert (change.role, name[0]) == (Role.PREFILL, "d")
    cluster.heartbeat(name, Load(free_blocks=1000), draining=True)
    assert tick(cluster, 100) == [], "nothing is decided while one is leaving"
    cluster.prefill(name, epoch=2, can_switch_role=True)
    views = cluster.state.cluster(cluster.now).instances
    assert {v.endpoint.instance_id for v in views if v.role is Role.PREFILL} == {"p0", name}
    placed = {cluster.place(f"s{i}", max_tokens=1).prefill.instance_id for i in range(4)}
    assert name in placed


@pytest.mark.parametrize(
    ("objectives_s", "num_changes"),
    [((), 0), ((0.5,), 0), ((1.5,), 1)],
    ids=["nobody is refused", "what no worker could do", "what another worker could"],
)
def test_rejections_count_as_need_while_queues_are_short(objectives_s: tuple[float, ...], num_changes: int) -> None:
    """Rejections count as need only if another worker could serve the prompt. The queue is 2 s, the objective 30 s."""
    cluster = cluster_of()
    changes: list[RoleChangeDue] = []
    for second in range(60):
        cluster.place(f"r{second}", max_tokens=1)
        cluster.place(f"s{second}", max_tokens=1)
        cluster.report(f"r{second - 1}", RequestPhase.FINISHED)
        cluster.report(f"s{second - 2}", RequestPhase.FINISHED)
        for objective_s in objectives_s:
            cluster.reject(f"t{second}", ttft_slo_s=objective_s)
        changes += tick(cluster, 1)
    assert [change.role for change in changes] == [Role.PREFILL] * num_changes


@pytest.mark.parametrize("built", [{"can_switch_role": False}, {"switching": False}], ids=["fixed workers", "off"])
def test_unable_workers_and_disabled_switching_change_nothing(built: dict[str, bool]) -> None:
    cluster = cluster_of(**built)
    overload(cluster)
    assert tick(cluster, 5) == []


def test_full_decode_workers_need_a_prefill_worker() -> None:
    """The only prefill worker keeps its role. A second, idle one changes it once it is known to be idle."""
    cluster = cluster_of()
    for name in ("d0", "d1", "d2"):
        cluster.heartbeat(name, Load(free_blocks=100))
    assert tick(cluster, 5) == []
    cluster.prefill("p1", can_switch_role=True)
    cluster.heartbeat("p1")
    assert tick(cluster, 5) == [], "who is new counts as busy"
    (change,) = tick(cluster, 3 * int(BUSY_MEMORY_S))
    assert (change.role, change.endpoint.instance_id[0]) == (Role.DECODE, "p")


@pytest.mark.parametrize(
    ("load", "c0", "tbt_slo_s", "need"),
    [
        (Load(free_blocks=900, num_running=40), 0.0, 1.0, 0.4),  # 10 ms per sequence
        (Load(free_blocks=250, num_running=1), 0.0, 1.0, 0.75),  # share of its blocks
        (Load(free_blocks=1000), 0.0, 1.0, 0.0),
        # Only the time that sequences add to a step counts: 40 take 0.4 of the remaining 0.5 s.
        (Load(free_blocks=1000, num_running=40), 0.5, 1.0, 0.8),
        (Load(free_blocks=1000, num_running=40), 0.5, 0.5, 0.0),
    ],
)
def test_decode_load_is_the_larger_of_step_and_blocks(load: Load, c0: float, tbt_slo_s: float, need: float) -> None:
    cluster = Cluster()
    cluster.decode("d0", decode_profile=replace(DECODE, c0=c0))
    cluster.heartbeat("d0", load)
    loads = RoleLoads(cluster.state._members, ttft_slo_s=30.0, tbt_slo_s=tbt_slo_s)
    (found,) = loads.worker_loads(cluster.now)
    assert (found.need, found.use) == (NEAR(need), NEAR(need))
