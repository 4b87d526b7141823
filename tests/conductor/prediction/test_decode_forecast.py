"""Tests of predictions for prefill queues and decode instances, against plain lists of prompts and sequences."""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonserve.conductor.events import Load
from moonserve.conductor.prediction.decode_forecast import INSTANTS, DecodeForecast
from moonserve.conductor.prediction.instance_table import PrefillTable, RowRef
from moonserve.conductor.prediction.queue_time import VISIBLE_AFTER_S, PrefillQueue
from moonserve.protocol.request import RequestId
from tests.conductor.cluster import PREFILL, Cluster

EVERY = np.array([1, 2])


def seen(outlook: DecodeForecast, number: int, *instants: float) -> list[list[float]]:
    """Returns [running sequences, context tokens, held tokens] of an instance at instants, interpolated linearly."""
    offsets = np.array(instants) - outlook._instants[0]
    columns = [np.interp(offsets, INSTANTS, sums) for sums in outlook._sums[number]]
    return np.maximum(np.array(columns).T, 0.0).tolist()  # type: ignore[no-any-return]


NONE = [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        # Tokens are held from placement on. The sequence runs from its begin to its limit: 40 tokens, one per 0.1 s.
        (
            {"most": 40, "begins_at": 2.0, "step_s": 0.1, "expected": 40.0},
            {0.0: [0, 0, 100], 2.0: [1, 100, 100], 4.0: [1, 120, 120], 6.0: NONE, 500.0: NONE},
        ),
        # An output of unknown length ends at a constant rate, which is one over its mean.
        (
            {"most": 10**9, "begins_at": 0.0, "step_s": 0.1, "expected": 40.0},
            {4.0: [math.exp(-1), 140 * math.exp(-1), 140 * math.exp(-1)]},
        ),
        # A short sequence between two instants counts at both, by its share of the time between them.
        (
            {"most": 10, "begins_at": 2.5, "step_s": 0.02, "expected": 10.0},
            {1.5: [0, 0, 100], 2.0: [0.2, 21, 100], 3.0: [0.2, 21, 21], 4.0: NONE},
        ),
    ],
)
def test_forecast_of_a_sequence_at_each_instant(sequence: dict[str, Any], expected: dict[float, list[float]]) -> None:
    outlook = DecodeForecast()
    number = outlook.add_instance()
    outlook.advance(0.0)
    slot = outlook.add(number, tokens=100, **sequence)
    for found, row in zip(seen(outlook, number, *expected), expected.values(), strict=True):
        assert found == pytest.approx(row, rel=1e-6)
    outlook.validate()
    if sequence["begins_at"] == 0.0:
        outlook.advance(4.0)
        assert seen(outlook, number, 4.0)[0][0] == 1.0, "who is there is there"
    outlook.remove_instance(number)
    assert outlook.add_instance() == number, "numbers are used again"
    assert seen(outlook, number, 4.0, 5.0) == [NONE, NONE]
    outlook.advance(10.0)
    assert seen(outlook, number, 11.0) == [NONE]
    outlook.remove(slot)
    outlook.validate()


def test_late_first_token_moves_the_end_and_heartbeat_updates_it() -> None:
    outlook = DecodeForecast()
    number = outlook.add_instance()
    outlook.advance(0.0)
    slot = outlook.add(number, tokens=10, most=99, begins_at=1.0, step_s=0.5, expected=4.0)
    outlook.begin(slot, 4.0)
    outlook.advance(8.0)
    assert outlook.expected_ends(number, 4.0).ends_s.tolist() == pytest.approx([2.0])
    progress = outlook.running(number, 8.0)
    assert (progress.generated.tolist(), progress.most.tolist()) == ([8.0], [99.0])
    outlook.update_remaining(progress, np.array([91.0]), 1.0, 8.0)  # to its limit
    assert seen(outlook, number, 10.0) == [pytest.approx([1.0, 20.0, 20.0])]
    assert outlook.expected_ends(number, 8.0).ends_s.tolist() == pytest.approx([91.0])
    outlook.validate()


@pytest.mark.parametrize("policy", ["global-cache-aware", "moonserve"])
def test_a_burst_of_very_short_answers_is_spread_over_decode_workers(policy: str) -> None:
    """A decode worker with one more running sequence gets fewer requests of the burst, but not none."""
    cluster = Cluster("p0", "p1", "p2", "p3", "d0", "d1", policy=policy)
    cluster.heartbeat("d0", Load(num_running=1, free_blocks=990))
    placed = [cluster.place(f"r{i}", tokens=10, max_tokens=20) for i in range(12)]
    chosen = Counter(placement.decode.instance_id for placement in placed)
    assert chosen["d0"] in range(3, 6)


@dataclass
class Known:
    """A sequence of the reference model."""

    number: int
    tokens: float
    most: float
    begins_at: float
    as_of: float
    step_s: float
    end_rate: float
    generated: float = 0.0

    def at(self, instant: float, now: float) -> tuple[float, float, float]:
        """Returns running sequences, context tokens and held tokens at `instant`."""
        left_s = (self.most - self.generated) * self.step_s
        mean_s = 1.0 / (self.end_rate + 1.0 / max(left_s, self.step_s))
        for before, after in pairwise((now + INSTANTS).tolist()):
            if before < self.as_of < after and mean_s < after - before:
                share = mean_s / (after - before)
                held = share * (self.tokens + self.generated + mean_s / self.step_s / 2)
                if instant in (before, after):
                    return share, held, held if instant == after else self.tokens
                return 0.0, 0.0, self.tokens if instant < before else 0.0
        passed = max(instant - self.as_of, 0.0)
        if passed >= (self.most - self.generated) * self.step_s:
            return 0.0, 0.0, 0.0
        likely = math.exp(-self.end_rate * min(passed, instant - now))
        held = likely * (self.tokens + self.generated + passed / self.step_s)
        return (likely, held, held) if instant >= self.begins_at else (0.0, 0.0, held)


class Sequences(RuleBasedStateMachine):
    """State machine test of `DecodeForecast` with two instances. Compares at its instants only; others are
    interpolated."""

    @initialize()
    def begin(self) -> None:
        self.outlook = DecodeForecast()
        self.now = self.drawn_at = 0.0
        for _ in EVERY:
            self.outlook.add_instance()
        self.known: dict[int, Known] = {}
        self.outlook.advance(self.now)

    @rule(
        number=st.sampled_from(EVERY.tolist()),
        tokens=st.integers(1, 1000),
        delay=st.floats(0, 40),
        step_s=st.floats(0.01, 2.0),
        expected=st.floats(1, 100),
        most=st.integers(100, 500),
    )
    def add(self, number: int, tokens: int, delay: float, step_s: float, expected: float, most: int) -> None:
        begins_at = self.now + delay
        slot = self.outlook.add(number, tokens=tokens, most=most, begins_at=begins_at, step_s=step_s, expected=expected)
        assert slot not in self.known
        rate = (1 / expected - 1 / most) / step_s
        self.known[slot] = Known(number, tokens, most, begins_at, begins_at, step_s, rate)

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        if self.known:
            slot = data.draw(st.sampled_from(sorted(self.known)))
            self.outlook.begin(slot, self.now)
            known = self.known[slot]
            known.begins_at = known.as_of = self.now
            known.generated = 0.0
            self.outlook.advance(self.now + 1.0)  # the instants are stale: draws again
            self.outlook.advance(self.now)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.known:
            slot = data.draw(st.sampled_from(sorted(self.known)))
            self.outlook.remove(slot)
            del self.known[slot]

    @rule(number=st.sampled_from(EVERY.tolist()), share=st.floats(0, 1), step_s=st.floats(0.01, 2))
    def renew(self, number: int, share: float, step_s: float) -> None:
        progress = self.outlook.running(number, self.now)
        remaining = share * (progress.most - progress.generated)
        for slot, goes_on in zip(progress.slots.tolist(), remaining.tolist(), strict=True):
            known = self.known[slot]
            assert known.number == number
            generated = known.generated + (self.now - known.as_of) / known.step_s
            left = max(known.most - generated, 1.0)
            known.generated, known.as_of, known.step_s = known.most - left, self.now, step_s
            known.end_rate = (1 / min(max(goes_on, 1.0), left) - 1 / left) / step_s
        self.outlook.update_remaining(progress, remaining, step_s, self.now)

    @rule(seconds=st.floats(0.6, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.drawn_at = self.now
        self.outlook.advance(self.now)

    @invariant()
    def agrees(self) -> None:
        self.outlook.validate()
        assert len(self.outlook) == len(self.known)
        instants = (self.drawn_at + INSTANTS).tolist()
        sums = self.outlook._sums[EVERY]
        for column, instant in enumerate(instants):
            if any(self.is_edge(known, instant) for known in self.known.values()):
                continue  # rounding decides on which side of the edge the instant lies
            for row, number in enumerate(EVERY.tolist()):
                own = [k.at(instant, self.drawn_at) for k in self.known.values() if k.number == number]
                for kind, found in enumerate(sums[row, :, column].tolist()):
                    expected = sum(each[kind] for each in own)
                    assert found == pytest.approx(expected, rel=1e-4, abs=1e-2)

    @staticmethod
    def is_edge(known: Known, instant: float) -> bool:
        ends_at = known.as_of + (known.most - known.generated) * known.step_s
        return min(abs(instant - known.begins_at), abs(instant - ends_at)) < 1e-6


TestSequences = Sequences.TestCase


NEAR = pytest.approx


def queue_of(*jobs: tuple[str, float, float], step_s: float = math.inf) -> PrefillQueue:
    """Returns a queue of prompts (name, seconds, rank) that arrived at 0."""
    queue = PrefillQueue(RowRef.in_private_table(PrefillTable), step_s)
    for name, seconds, rank in jobs:
        queue.add(RequestId(name), seconds, 100, 0.0, rank)
    return queue


def test_lower_rank_runs_before_the_rest_of_a_chunked_prompt() -> None:
    """A lower rank interrupts a running prompt between steps. 10 s of work interrupted after 2 s still need 8 s."""
    queue = queue_of(("running", 10.0, 9.0), step_s=1.0)
    assert queue.wait_for(2.0, 1.0) == (NEAR(1.0), 1), "for the step under way"
    assert queue.wait_for(9.5, -1.0) == (NEAR(0.5), 0), "its last step is under way"
    assert queue.wait_for(2.0, 8.0) == (NEAR(8.0), 0), "behind it"
    queue.add(RequestId("short"), 3.0, 100, 2.0, 1.0)
    queue.remove(RequestId("short"), 5.0)
    assert [queue.estimate_s(now) for now in (5.0, 6.0, 100.0)] == [NEAR(8.0), NEAR(7.0), 0.0]
    queue.validate()


def test_heartbeat_removes_the_lowest_ranks() -> None:
    """If a heartbeat reports the tokens of one of three settled prompts, the last to run stays, and runs from then."""
    queue = queue_of(("first", 1.0, 9.0), ("last", 1.0, 8.0), ("middle", 1.0, 1.0))
    assert queue.correct(Load(queued_tokens=100), PREFILL, VISIBLE_AFTER_S / 2) == []
    assert queue.correct(Load(queued_tokens=100), PREFILL, 10.0) == ["first", "middle"]
    assert queue.wait_for(10.5, 0.0) == (NEAR(0.5), 0)
    queue.validate()


class Queues(RuleBasedStateMachine):
    """State machine test of `PrefillQueue` against a plain list."""

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
            assert self.queue.wait_for(self.now, rank) == (NEAR(waits_s), behind)


TestQueues = Queues.TestCase
