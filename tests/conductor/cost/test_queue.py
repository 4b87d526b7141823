"""Predicted queue times: the same as a plain list in the order in which work runs."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from conductor.columns import PrefillTable, Seat
from conductor.cost.queue import SETTLE_S, PrefillQueue
from conductor.events import Load
from protocol.ids import RequestId
from tests.conductor.cluster import PREFILL

NEAR = pytest.approx


def queue_of(*jobs: tuple[str, float, float], step_s: float = math.inf) -> PrefillQueue:
    """Names, seconds and ranks of prompts that came at 0."""
    queue = PrefillQueue(Seat.alone(PrefillTable), step_s)
    for name, seconds, rank in jobs:
        queue.add(RequestId(name), seconds, 100, 0.0, rank)
    return queue


def test_a_prompt_yields_only_to_those_that_come_within_its_rank() -> None:
    """So that nobody starves, and equal ranks are the order of arrival."""
    queue = queue_of(("running", 4.0, 0.0), ("patient", 1.0, 10.0))
    assert queue.look(3.0, 6.0) == (NEAR(1.0), 1)
    assert queue.look(3.0, 7.0) == (NEAR(2.0), 0), "arrived later, yields as much"
    assert queue.look(11.0, 0.0) == (NEAR(1.0), 0), "too late to be yielded to"


def test_where_work_runs_in_steps_a_lower_rank_goes_before_the_rest_of_what_runs() -> None:
    """10 s of work, interrupted after 2 s by 3 s: what is left then is 8 s, and 7 s after one more."""
    queue = queue_of(("running", 10.0, 9.0), step_s=1.0)
    assert queue.look(2.0, 1.0) == (NEAR(1.0), 1), "for the step under way"
    assert queue.look(9.5, -1.0) == (NEAR(0.5), 0), "its last step is under way"
    assert queue.look(2.0, 8.0) == (NEAR(8.0), 0), "behind it"
    queue.add(RequestId("short"), 3.0, 100, 2.0, 1.0)
    queue.remove(RequestId("short"), 5.0)
    assert [queue.estimate_s(now) for now in (5.0, 6.0, 100.0)] == [NEAR(8.0), NEAR(7.0), 0.0]
    queue.validate()


def test_a_heartbeat_takes_out_what_goes_first_by_rank() -> None:
    """Three settled prompts, tokens of one left: it is the one that would run last, placed when it may have been."""
    queue = queue_of(("first", 1.0, 9.0), ("last", 1.0, 8.0), ("middle", 1.0, 1.0))
    assert queue.correct(Load(queued_tokens=100), PREFILL, SETTLE_S / 2) == []
    assert queue.correct(Load(queued_tokens=100), PREFILL, 10.0) == ["first", "middle"]
    assert queue.look(10.5, 0.0) == (NEAR(0.5), 0)
    queue.validate()


class Queues(RuleBasedStateMachine):
    """Beside a plain list."""

    @initialize(step_s=st.sampled_from([math.inf, 0.0, 5.0]))
    def begin_with(self, step_s: float) -> None:
        self.step_s, self.now, self.arrivals = step_s, 0.0, 0
        self.queue = queue_of(step_s=step_s)
        self.waiting: list[tuple[float, int, int, float]] = []  # place, arrival, key, seconds
        self.running: tuple[float, int, int, float] | None = None
        self.since = 0.0

    @rule(key=st.integers(0, 30), seconds=st.floats(0.0, 100.0), rank=st.sampled_from([-1.0, 0.0, 2.5]))
    def add(self, key: int, seconds: float, rank: float) -> None:
        self.remove(key)
        self.queue.add(RequestId(str(key)), seconds, key, self.now, rank)
        self.arrivals += 1
        self.waiting.append((self.now + rank, self.arrivals, key, seconds))
        self.run_next()

    @rule(key=st.integers(0, 30))
    def remove(self, key: int) -> None:
        self.queue.remove(RequestId(str(key)), self.now)
        for job in [job for job in self.waiting if job[2] == key]:
            if self.interrupts(job[:2]):
                self.since = min(self.since + job[3], self.now)
            self.waiting.remove(job)
        if self.running is not None and self.running[2] == key:
            self.running = None
        self.run_next()

    @rule(seconds=st.floats(0.0, 50.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def run_next(self) -> None:
        if self.running is None and self.waiting:
            self.running, self.since = min(self.waiting), self.now
            self.waiting.remove(self.running)

    def interrupts(self, place: tuple[float, int]) -> bool:
        return self.running is not None and math.isfinite(self.step_s) and place < self.running[:2]

    @invariant()
    def agrees(self) -> None:
        self.queue.validate()
        whole_s = 0.0 if self.running is None else self.running[3]
        left_s = max(whole_s - (self.now - self.since), 0.0)
        assert self.queue.estimate_s(self.now) == NEAR(left_s + sum(job[3] for job in self.waiting))
        for rank in (-60.0, -1.0, 0.0, 1.0, 2.5):
            place = (self.now + rank, self.arrivals + 1)
            ahead_s = sum(job[3] for job in self.waiting if job[0] <= place[0])
            goes_before = self.interrupts(place) and left_s > self.step_s
            behind = sum(job[0] > place[0] for job in self.waiting) + goes_before
            waits_s = (self.step_s if goes_before else left_s) + ahead_s
            assert self.queue.look(self.now, rank) == (NEAR(waits_s), behind)


TestQueues = Queues.TestCase
