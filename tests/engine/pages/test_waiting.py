"""The line of those who wait, and the guess when blocks come back. Without threads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.pages.base import Wish
from engine.pages.waiting import Turnover, Waiter, WaitingLine


@given(st.lists(st.integers(0, 5), max_size=20), st.data())
def test_the_line_is_by_rank_and_then_by_arrival(ranks: list[int], data: st.DataObject) -> None:
    """Whoever leaves out of turn."""
    line = WaitingLine(20)
    waiters = [Waiter(Wish(number, 1), rank) for number, rank in enumerate(ranks)]
    for waiter in waiters:
        line.join(waiter)
        line.validate()
    gone = data.draw(st.sets(st.sampled_from(waiters))) if waiters else set()
    for waiter in gone:
        line.leave(waiter)
    expected = sorted((w for w in waiters if w not in gone), key=lambda waiter: -waiter.rank)
    served = []
    while line:
        line.validate()
        assert line.barrier == line.first.rank + 1
        served.append(line.first)
        line.leave(line.first)
    assert served == expected
    assert line.barrier == 0


def test_a_full_line_is_told() -> None:
    """Nobody may wait where none may."""
    assert WaitingLine(0).is_full
    line = WaitingLine(1)
    assert not line.is_full
    line.join(Waiter(Wish(1, 1), 0))
    assert line.is_full


def test_turnover_forgets_what_was_long_ago() -> None:
    """After two looks the time before them no longer counts."""
    turnover = Turnover(now=0.0)
    assert turnover.retry_after_s(1.0, 100, 200) == 2.0
    assert turnover.retry_after_s(10.0, 100, 20) == 2.0
    assert turnover.retry_after_s(20.0, 100, 20) == 4.0
    assert turnover.retry_after_s(30.0, 100, 20) == Turnover.LONGEST_S
    assert turnover.retry_after_s(30.0, 10**9, 1) == Turnover.SHORTEST_S
