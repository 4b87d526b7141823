"""When a worker changes its role: helped where it is needed, never to and fro."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.roles.controller import RoleChange, RoleController, RoleTerms, WorkerLoad
from protocol.errors import ConfigError
from protocol.ids import InstanceId, Role

TERMS = RoleTerms(high=0.7, low=0.5, hold_s=10.0, cool_down_s=60.0)
TICK_S = 1.0


def load(
    name: str,
    role: Role,
    use: float,
    *,
    need: float | None = None,
    can_change: bool = True,
    draining: bool = False,
) -> WorkerLoad:
    return WorkerLoad(
        instance_id=InstanceId(name),
        role=role,
        can_change=can_change,
        draining=draining,
        need=use if need is None else need,
        use=use,
    )


def prefills(*uses: float) -> list[WorkerLoad]:
    return [load(f"p{i}", Role.PREFILL, use) for i, use in enumerate(uses)]


def decodes(*uses: float) -> list[WorkerLoad]:
    return [load(f"d{i}", Role.DECODE, use) for i, use in enumerate(uses)]


def held(loads: list[WorkerLoad], controller: RoleController | None = None) -> RoleChange | None:
    """What is decided after the same loads have been seen for as long as it takes."""
    controller = controller or RoleController(TERMS)
    assert controller.decide(loads, 0.0) is None
    return controller.decide(loads, TERMS.hold_s)


def test_the_least_used_worker_of_the_other_role_helps() -> None:
    change = held([*prefills(0.9), *decodes(0.3, 0.1, 0.2)])
    assert change == RoleChange(instance_id=InstanceId("d1"), role=Role.PREFILL)
    change = held([*prefills(0.1, 0.2), *decodes(0.8)])
    assert change == RoleChange(instance_id=InstanceId("p0"), role=Role.DECODE)


def test_no_help_that_would_leave_the_helpers_above_the_lower_threshold() -> None:
    assert held([*prefills(0.9), *decodes(0.26, 0.26)]) is None
    assert held([*prefills(0.9), *decodes(0.25, 0.25)]) is not None


def test_the_last_of_a_role_stays() -> None:
    assert held([*prefills(5.0), *decodes(0.0)]) is None


def test_nobody_is_asked_who_cannot_change() -> None:
    fixed = [load("d0", Role.DECODE, 0.0, can_change=False), load("d1", Role.DECODE, 0.1)]
    change = held([*prefills(0.9), *fixed])
    assert change is not None
    assert change.instance_id == "d1"
    assert held([*prefills(0.9), *(load(n, Role.DECODE, 0.0, can_change=False) for n in "xy")]) is (
        None
    )


def test_use_without_need_asks_for_no_help() -> None:
    busy = load("p0", Role.PREFILL, 1.0, need=0.1)
    assert held([busy, *decodes(0.0, 0.0)]) is None


def test_nothing_is_decided_while_a_worker_is_leaving() -> None:
    leaving = load("d2", Role.DECODE, 0.0, draining=True)
    assert held([*prefills(0.9), *decodes(0.0, 0.0), leaving]) is None


def test_a_need_that_passes_is_none() -> None:
    controller = RoleController(TERMS)
    needy, content = [*prefills(0.9), *decodes(0.0, 0.0)], [*prefills(0.6), *decodes(0.0, 0.0)]
    for round_at in range(0, 100, 10):
        assert controller.decide(needy, round_at) is None
        assert controller.decide(needy, round_at + 9.9) is None
        assert controller.decide(content, round_at + 9.95) is None


def test_the_next_change_waits_for_the_effect_of_the_last() -> None:
    controller = RoleController(TERMS)
    loads = [*prefills(0.9), *decodes(0.0, 0.0, 0.0)]
    assert held(loads, controller) is not None
    changed_at = TERMS.hold_s
    assert controller.decide(loads, changed_at + TERMS.cool_down_s - 1) is None
    assert controller.decide(loads, changed_at + TERMS.cool_down_s + TERMS.hold_s) is not None


@pytest.mark.parametrize("values", [{"low": 0.8}, {"low": 0.0}, {"hold_s": -1.0}])
def test_terms_that_would_oscillate_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RoleTerms(**values)


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
def test_whatever_loads_come_each_role_keeps_one_and_who_changes_is_able(
    rounds: list[list[WorkerLoad]],
) -> None:
    controller = RoleController(RoleTerms(hold_s=0.0, cool_down_s=0.0))
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
    """A cluster under constant load: work flows in, is shared out evenly, and queues where it is too much."""

    def __init__(self, num_prefill: int, num_decode: int, prompts: float, answers: float) -> None:
        names = [f"w{i}" for i in range(num_prefill + num_decode)]
        self.roles = {
            name: Role.PREFILL if i < num_prefill else Role.DECODE for i, name in enumerate(names)
        }
        self._prompts, self._answers = prompts, answers  # workers' worth
        # Of each prefill worker, over the target; full at 1, where requests are rejected.
        self._queue = 0.0

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

    def flow(self, seconds: float) -> None:
        excess = self._prompts / self.count(Role.PREFILL) - 1.0
        self._queue = min(max(self._queue + excess * seconds / 30.0, 0.0), 1.0)


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.0, 8.0), st.floats(0.0, 8.0))
def test_under_constant_load_it_settles_and_nobody_changes_twice(
    num_prefill: int, num_decode: int, prompts: float, answers: float
) -> None:
    cluster = Fluid(num_prefill, num_decode, prompts, answers)
    controller = RoleController(TERMS)
    changes: Counter[str] = Counter()
    for tick in range(1_500):
        change = controller.decide(cluster.loads(), tick * TICK_S)
        if change is not None:
            cluster.roles[change.instance_id] = change.role
            changes[change.instance_id] += 1
        cluster.flow(TICK_S)
    assert min(cluster.count(Role.PREFILL), cluster.count(Role.DECODE)) >= 1
    assert all(times == 1 for times in changes.values())


def test_a_cluster_that_has_enough_workers_balances() -> None:
    """Six workers' worth of room for four of prompts and half a one of answers, begun the wrong way round."""
    cluster = Fluid(1, 6, prompts=3.8, answers=0.5)
    controller = RoleController(TERMS)
    for tick in range(1_500):
        change = controller.decide(cluster.loads(), tick * TICK_S)
        if change is not None:
            cluster.roles[change.instance_id] = change.role
        cluster.flow(TICK_S)
    assert cluster.count(Role.PREFILL) >= 4
    assert max(each.need for each in cluster.loads()) < TERMS.high
