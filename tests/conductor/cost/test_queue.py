"""Predicted queue times: the same as a plain list in the order in which work runs."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.cost.queue import WorkQueue


def test_a_newcomer_waits_for_the_rest_of_what_runs_and_for_all_before_it() -> None:
    queue = WorkQueue()
    queue.add("a", 2.0, now=10.0)
    queue.add("b", 3.0, now=10.5)
    assert queue.wait_s(10.5) == pytest.approx(1.5 + 3.0)
    assert queue.wait_of_s("a", 10.5) == 0.0
    assert queue.wait_of_s("b", 10.5) == pytest.approx(1.5)
    queue.remove("a", 11.0)
    assert queue.wait_of_s("b", 12.0) == 0.0
    assert queue.residual_s(12.0) == pytest.approx(2.0)


def test_a_lower_rank_goes_before_what_waits_but_not_before_what_runs() -> None:
    queue = WorkQueue()
    for key, rank in (("running", 5.0), ("late", 9.0), ("early", 1.0), ("equal", 1.0)):
        queue.add(key, 1.0, now=0.0, rank=rank)
    assert queue.wait_of_s("early", 0.0) == pytest.approx(1.0)
    assert queue.wait_of_s("equal", 0.0) == pytest.approx(2.0)
    assert queue.wait_of_s("late", 0.0) == pytest.approx(3.0)
    assert queue.wait_s(0.0, rank=0.0) == pytest.approx(1.0)
    assert queue.wait_s(0.0, rank=1.0) == pytest.approx(3.0)
    assert queue.wait_s(0.0, rank=9.0) == queue.total_s(0.0) == pytest.approx(4.0)


def test_what_takes_longer_than_predicted_has_no_time_left_to_predict() -> None:
    queue = WorkQueue()
    queue.add("slow", 1.0, now=0.0)
    assert queue.wait_s(100.0) == 0.0


def test_ten_thousand_entries_do_not_make_a_deep_tree() -> None:
    """In the order of arrival, the worst for a tree that does not balance: recursion would end the test."""
    queue = WorkQueue()
    for number in range(10_000):
        queue.add(number, 0.001, now=0.0)
    assert queue.wait_s(0.0) == pytest.approx(10.0)
    for number in range(10_000):
        queue.remove(number, now=0.0)
    assert queue.total_s(0.0) == 0.0
    queue.validate()


class Queue(RuleBasedStateMachine):
    """Beside a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WorkQueue()
        self.waiting: list[tuple[float, int, int, float]] = []  # rank, arrival, key, seconds
        self.running: tuple[int, float, float] | None = None  # key, seconds, since
        self.arrivals = 0
        self.now = 0.0

    @rule(
        key=st.integers(0, 30),
        seconds=st.floats(0.0, 100.0),
        rank=st.sampled_from([-1.0, 0.0, 0.0, 2.5]),
    )
    def add(self, key: int, seconds: float, rank: float) -> None:
        self.remove(key)
        self.queue.add(key, seconds, self.now, rank)
        self.arrivals += 1
        self.waiting.append((rank, self.arrivals, key, seconds))
        self.begin()

    @rule(key=st.integers(0, 30))
    def remove(self, key: int) -> None:
        self.queue.remove(key, self.now)
        self.waiting = [one for one in self.waiting if one[2] != key]
        if self.running is not None and self.running[0] == key:
            self.running = None
        self.begin()

    @rule(seconds=st.floats(0.0, 50.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def begin(self) -> None:
        if self.running is None and self.waiting:
            first = min(self.waiting)
            self.waiting.remove(first)
            self.running = (first[2], first[3], self.now)

    @invariant()
    def agrees(self) -> None:
        self.queue.validate()
        residual = 0.0
        if self.running is not None:
            residual = max(self.running[1] - (self.now - self.running[2]), 0.0)
        for rank in (-2.0, -1.0, 0.0, 1.0, 2.5, 3.0):
            ahead = sum(seconds for other, _, _, seconds in self.waiting if other <= rank)
            assert self.queue.wait_s(self.now, rank) == pytest.approx(residual + ahead)
            behind = sum(other > rank for other, _, _, _ in self.waiting)
            assert self.queue.num_delayed(rank) == behind
        for number, (_, _, key, _) in enumerate(sorted(self.waiting)):
            ahead = sum(one[3] for one in sorted(self.waiting)[:number])
            assert self.queue.wait_of_s(key, self.now) == pytest.approx(residual + ahead)
        assert len(self.queue) == len(self.waiting) + (self.running is not None)


TestQueue = Queue.TestCase
