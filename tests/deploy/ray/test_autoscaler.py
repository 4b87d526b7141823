"""Tests of the number of workers by load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.conductor.role_switching import WorkerLoad
from moonserve.deploy.ray.autoscaler import Autoscaler, Change
from moonserve.deploy.ray.config import ScaleTerms, Workers
from moonserve.protocol.request import InstanceId, Role

TERMS = ScaleTerms(high=0.7, low=0.4, up_hold_s=10, down_hold_s=30, cool_down_s=20)
BOUNDS = dict.fromkeys((Role.PREFILL, Role.DECODE), Workers(min=1, max=3))
P, D = Role.PREFILL, Role.DECODE


def loads(
    prefill: list[float], decode: list[float], *, can_change: bool = False, draining: bool = False
) -> list[WorkerLoad]:
    flags = {"can_change": can_change, "draining": draining}
    return [
        WorkerLoad(instance_id=InstanceId(f"{role}-{number}"), role=role, need=load, use=load, **flags)
        for role, own in ((P, prefill), (D, decode))
        for number, load in enumerate(own)
    ]


def changes(scaler: Autoscaler, seen: list[WorkerLoad], start: int, seconds: int) -> list[Change]:
    asked = (scaler.decide(seen, len(seen), now) for now in range(start, start + seconds))
    return [change for change in asked if change is not None]


def test_only_a_lasting_need_adds_a_worker_and_none_follows_within_the_cool_down() -> None:
    scaler = Autoscaler(TERMS, BOUNDS)
    busy, calm = loads([0.9], [0.5]), loads([0.5], [0.5])
    assert changes(scaler, busy, 0, 10) == []
    assert changes(scaler, calm, 10, 1) == []
    assert changes(scaler, busy, 11, 10) == []
    assert changes(scaler, busy, 21, 1) == [Change(role=P)]
    assert changes(scaler, busy, 22, 19) == []
    assert changes(scaler, busy, 41, 1) == [Change(role=P)]


@pytest.mark.parametrize(
    ("seen", "seconds", "expected"),
    [
        (loads([0.9] * 3, [0.5]), 100, []),  # the maximum is reached
        (loads([0.5], [0.9, 0.9]), 11, [Change(role=D)]),
        (loads([0.0], [0.0]), 100, []),
        (
            loads([0.5], [0.3, 0.1, 0.2]),  # the others can take over the least used worker's work
            31,
            [Change(role=D, leaving=InstanceId("decode-1"))],
        ),
        (loads([0.1] * 2, [0.1] * 2, draining=True), 100, []),
        (loads([0.9] * 2, [0.0] * 2), 15, [Change(role=P)]),  # prefill lacks a worker, and decode is idle
        # The conductor can change a worker's role, which needs no new machine.
        (loads([0.9], [0.1, 0.1], can_change=True), 100, []),
        (loads([0.9], [0.6, 0.6], can_change=True), 11, [Change(role=P)]),
    ],
)
def test_a_lasting_load_leads_to_expected_change(seen: list[WorkerLoad], seconds: int, expected: list[Change]) -> None:
    assert changes(Autoscaler(TERMS, BOUNDS), seen, 0, seconds) == expected


def test_no_worker_is_removed_while_another_starts() -> None:
    idle, scaler = loads([0.1] * 2, [0.1] * 2), Autoscaler(TERMS, BOUNDS)
    assert [scaler.decide(idle, len(idle) + 1, now) for now in range(100)] == [None] * 100


@given(work=st.floats(0.0, 2.5), other=st.floats(0.0, 2.5), count=st.integers(1, 3))
def test_a_constant_load_changes_a_role_in_one_direction_only(work: float, other: float, count: int) -> None:
    """With constant load, divided evenly among workers, all changes of a role have the same direction."""
    scaler, counts = Autoscaler(TERMS, BOUNDS), {P: count, D: count}
    steps: dict[Role, list[int]] = {P: [], D: []}
    for now in range(1000):
        seen = loads([work / counts[P]] * counts[P], [other / counts[D]] * counts[D])
        change = scaler.decide(seen, len(seen), now)
        if change is not None:
            step = 1 if change.leaving is None else -1
            counts[change.role] += step
            steps[change.role].append(step)
            assert BOUNDS[change.role].min <= counts[change.role] <= BOUNDS[change.role].most
    assert all(len(set(taken)) <= 1 for taken in steps.values())
