"""Prompts wait in the order of arrival + rank: nobody is passed by what comes later than that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefill_worker import actions as act
from prefill_worker.ledger import RequestQueue
from prefill_worker.sequence import Sequence
from protocol.ids import LeaseId
from tests.prefill_worker.builders import make_placement, make_request
from tests.prefill_worker.walks import Walk, all_of, only, spans


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 20.0)), max_size=30))
def test_nobody_is_passed_by_what_arrives_later_than_its_rank(arrivals: list[tuple[float, float]]) -> None:
    """Gaps before arrivals, and ranks."""
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
        order.append(came[head.request_id])
    assert len(order) == len(arrivals)
    for place, (arrived_at, rank) in enumerate(order):
        assert all(other <= arrived_at + rank for other, _ in order[:place])


def test_what_a_request_overtakes_does_not_keep_it_from_being_prepared() -> None:
    """Two are prepared, as many as look ahead; a third of their kind waits, one that goes before them does not."""
    walk = Walk(lookahead=2, budget=4, num_blocks=64, home=None)
    prepared = [
        bool(all_of(walk.submit(f"long{n}", 16, first=100 * n, rank=100.0), act.ReserveLanding)) for n in range(3)
    ]
    assert prepared == [True, True, False]
    short = only(walk.submit("short", 4, first=900, rank=1.0, at=5.0), act.ReserveLanding)
    assert short.request_id == "short"


def test_a_request_of_lower_rank_runs_before_the_rest_of_one_that_runs() -> None:
    """Between two steps, so that a long prompt's chunks do not hold up a short one."""
    walk = Walk(budget=4, num_blocks=64, home=None)
    step = walk.start("long", 16, rank=100.0)
    walk.grant(walk.submit("short", 4, first=900, at=1.0))
    step = only(walk.done(step), act.RunStep)
    assert spans([step]) == [("short", 0, 4)]
    assert spans(walk.done(step)) == [("long", 4, 8)]
