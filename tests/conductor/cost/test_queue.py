"""Predicted queue times: the same as a plain list in the order in which work runs."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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


def test_where_work_runs_in_steps_a_lower_rank_goes_before_the_rest_of_what_runs() -> None:
    """10 s of work, interrupted after 2 s by 3 s: what is left then is 8 s, and 7 s after one more."""
    queue: WorkQueue[str] = WorkQueue(step_s=1.0)
    queue.add("running", 10.0, now=0.0, rank=5.0)
    assert queue.wait_s(2.0, rank=1.0) == pytest.approx(1.0), "for the step under way"
    assert queue.look(2.0, rank=1.0) == (pytest.approx(1.0), 1)
    assert queue.look(9.5, rank=1.0) == (pytest.approx(0.5), 0), "its last step is under way"
    assert queue.wait_s(2.0, rank=5.0) == pytest.approx(8.0), "behind it"
    queue.add("short", 3.0, now=2.0, rank=1.0)
    queue.remove("short", now=5.0)
    assert queue.residual_s(5.0) == pytest.approx(8.0)
    assert queue.residual_s(6.0) == pytest.approx(7.0)
    queue.validate()


def test_what_takes_longer_than_predicted_has_no_time_left_to_predict() -> None:
    queue = WorkQueue()
    queue.add("slow", 1.0, now=0.0)
    assert queue.wait_s(100.0) == 0.0


def test_ten_thousand_entries_do_not_make_a_deep_tree() -> None:
    """In the order of arrival, the worst for a tree that does not balance: recursion would end the test."""
    queue: WorkQueue[int] = WorkQueue()
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
        self.queue: WorkQueue[int] = WorkQueue()
        self.waiting: list[tuple[float, int, int, float]] = []  # rank, arrival, key, seconds
        # Key, seconds, since, rank and arrival.
        self.running: tuple[int, float, float, tuple[float, int]] | None = None
        self.step_s = math.inf
        self.arrivals = 0
        self.now = 0.0

    @initialize(step_s=st.sampled_from([math.inf, 0.0, 5.0]))
    def begin_with(self, step_s: float) -> None:
        self.step_s = step_s
        self.queue = WorkQueue(step_s)

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
        for rank, arrival, other, seconds in self.waiting:
            if other == key and self.interrupts((rank, arrival)) and self.running is not None:
                name, whole, since, place = self.running
                self.running = (name, whole, min(since + seconds, self.now), place)
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
            self.running = (first[2], first[3], self.now, first[:2])

    def interrupts(self, place: tuple[float, int]) -> bool:
        return self.running is not None and math.isfinite(self.step_s) and place < self.running[3]

    def left_before(self, place: tuple[float, int]) -> float:
        """Of what runs, before that place."""
        if self.running is None:
            return 0.0
        left_s = max(self.running[1] - (self.now - self.running[2]), 0.0)
        return min(left_s, self.step_s) if self.interrupts(place) else left_s

    @invariant()
    def agrees(self) -> None:
        self.queue.validate()
        for rank in (-2.0, -1.0, 0.0, 1.0, 2.5, 3.0):
            place = (rank, self.arrivals + 1)
            ahead = sum(seconds for other, _, _, seconds in self.waiting if other <= rank)
            waits = self.left_before(place) + ahead
            assert self.queue.wait_s(self.now, rank) == pytest.approx(waits)
            behind = sum(other > rank for other, _, _, _ in self.waiting)
            rest = self.interrupts(place) and self.left_before((math.inf, 0)) > self.step_s
            assert self.queue.look(self.now, rank) == (pytest.approx(waits), behind + rest)
        for number, (rank, arrival, key, _) in enumerate(sorted(self.waiting)):
            ahead = sum(one[3] for one in sorted(self.waiting)[:number])
            waits = self.left_before((rank, arrival)) + ahead
            assert self.queue.wait_of_s(key, self.now) == pytest.approx(waits)
        assert len(self.queue) == len(self.waiting) + (self.running is not None)


TestQueue = Queue.TestCase
