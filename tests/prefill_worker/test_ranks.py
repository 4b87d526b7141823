"""Prompts wait in the order of arrival + rank: nobody is passed by what comes later than that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefill_worker import actions as act
from prefill_worker.queue import RequestQueue
from prefill_worker.sequence import Sequence
from protocol.ids import LeaseId
from tests.prefill_worker.builders import (
    granted,
    make_placement,
    make_request,
    make_state,
    step_done,
    submitted,
)

ARRIVALS = st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 20.0)), max_size=30)


def run_order(arrivals: list[tuple[float, float]]) -> list[tuple[str, float, float]]:
    """Names, times of arrival and ranks, as the queue gives them out when all have come: (gap before it, rank) each."""
    queue, now = RequestQueue(), 0.0
    came: dict[str, tuple[float, float]] = {}
    for number, (gap_s, rank) in enumerate(arrivals):
        now += gap_s
        request = make_request(f"r{number}", range(4))
        sequence = Sequence(
            request=request,
            placement=make_placement(request, rank=rank),
            rank=(0, now + rank, number),
            lease_id=LeaseId(f"l{number}"),
            submitted_at=now,
        )
        came[request.request_id] = (now, rank)
        queue.push(sequence)
    order = []
    while (head := queue.head()) is not None:
        queue.remove(head)
        order.append((head.request_id, *came[head.request_id]))
    return order


@given(ARRIVALS)
def test_nobody_is_passed_by_what_arrives_later_than_its_rank(
    arrivals: list[tuple[float, float]],
) -> None:
    order = run_order(arrivals)
    assert len(order) == len(arrivals)
    for place, (_, arrived_at, rank) in enumerate(order):
        passed_by = [other for _, other, _ in order[:place]]
        assert all(other <= arrived_at + rank for other in passed_by)


@given(st.lists(st.floats(0.0, 10.0), max_size=30), st.floats(0.0, 20.0))
def test_equal_ranks_are_the_order_of_arrival(gaps_s: list[float], rank: float) -> None:
    names = [name for name, _, _ in run_order([(gap_s, rank) for gap_s in gaps_s])]
    assert names == [f"r{number}" for number in range(len(gaps_s))]


def reserved(actions: list[act.Action]) -> list[str]:
    return [action.request_id for action in actions if isinstance(action, act.ReserveLanding)]


def test_what_a_request_overtakes_does_not_keep_it_from_being_prepared() -> None:
    """Two are prepared, as many as look ahead; a third of their kind waits, one that goes before them does not."""
    state = make_state(lookahead=2, budget=4, num_blocks=64, home=None)
    for number in range(3):
        request = make_request(f"long{number}", range(100 * number, 100 * number + 16))
        names = reserved(state.handle(submitted(request, rank=100.0), 0.0))
        assert names == ([f"long{number}"] if number < 2 else [])
    short = make_request("short", range(900, 904))
    assert reserved(state.handle(submitted(short, rank=1.0), 5.0)) == ["short"]
    state.validate()


def test_a_request_of_lower_rank_runs_before_the_rest_of_one_that_runs() -> None:
    """Between two steps, so that a long prompt's chunks do not hold up a short one."""
    state = make_state(budget=4, num_blocks=64, home=None)
    long, short = make_request("long", range(16)), make_request("short", range(900, 904))
    (reserve,) = state.handle(submitted(long, rank=100.0), 0.0)
    assert isinstance(reserve, act.ReserveLanding)
    step = run_step(state.handle(granted(reserve), 0.0))
    assert computes(step) == ["long"]
    (reserve,) = state.handle(submitted(short), 1.0)
    assert isinstance(reserve, act.ReserveLanding)
    state.handle(granted(reserve), 1.0)
    step = run_step(state.handle(step_done(step), 2.0))
    assert computes(step) == ["short"]
    step = run_step(state.handle(step_done(step), 3.0))
    assert computes(step) == ["long"]
    state.validate()


def run_step(actions: list[act.Action]) -> act.RunStep:
    (step,) = (action for action in actions if isinstance(action, act.RunStep))
    return step


def computes(step: act.RunStep) -> list[str]:
    return [plan.slice.request_id for plan in step.plans]
