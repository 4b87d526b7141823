"""What will run at coming instants: the sums agree with every sequence looked at by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from conductor.outlook import INSTANTS, Outlook

EVERY = np.array([1, 2])


def seen(outlook: Outlook, number: int, *instants: float) -> list[list[float]]:
    """Running sequences, tokens of their contexts, tokens held: of one instance at each instant."""
    sums = outlook.at(instants, np.array([number]))
    return [[float(column[row, 0]) for column in sums] for row in range(len(instants))]


def test_a_sequence_is_held_from_its_placement_and_runs_from_its_begin_to_its_limit() -> None:
    """100 tokens of prompt, from 2 s on a token per 0.1 s, 40 of them for certain."""
    outlook = Outlook()
    number = outlook.join()
    outlook.advance(0.0)
    outlook.add(number, tokens=100, most=40, begins_at=2.0, step_s=0.1, expected=40.0)
    assert seen(outlook, number, 0.0, 2.0, 4.0, 6.0, 500.0) == [
        pytest.approx([0.0, 0.0, 100.0]),
        pytest.approx([1.0, 100.0, 100.0]),
        pytest.approx([1.0, 120.0, 120.0]),
        pytest.approx([0.0, 0.0, 0.0]),
        pytest.approx([0.0, 0.0, 0.0]),
    ]


def test_an_answer_of_unknown_length_ends_at_the_rate_of_its_mean() -> None:
    outlook = Outlook()
    number = outlook.join()
    outlook.advance(0.0)
    outlook.add(number, tokens=100, most=10**9, begins_at=0.0, step_s=0.1, expected=40.0)
    ((running, context, held),) = seen(outlook, number, 4.0)
    assert running == pytest.approx(np.exp(-1.0), rel=1e-3)
    assert context == held == pytest.approx(140 * np.exp(-1.0), rel=1e-3)
    outlook.advance(4.0)
    assert seen(outlook, number, 4.0)[0][0] == 1.0, "who is there is there"


def test_a_first_token_that_comes_later_moves_the_end_as_well() -> None:
    outlook = Outlook()
    number = outlook.join()
    outlook.advance(0.0)
    slot = outlook.add(number, tokens=10, most=3, begins_at=1.0, step_s=1.0, expected=3.0)
    outlook.begin(slot, 4.0)
    outlook.advance(4.0)
    assert seen(outlook, number, 6.0)[0][0] == pytest.approx(1.0)
    assert outlook.drain(number, 4.0).ends_s.tolist() == pytest.approx([3.0])
    outlook.validate()


def test_a_heartbeat_renews_how_far_it_is_and_how_long_it_goes_on() -> None:
    outlook = Outlook()
    number = outlook.join()
    outlook.add(number, tokens=10, most=99, begins_at=1.0, step_s=0.5, expected=4.0)
    outlook.advance(5.0)
    progress = outlook.running(number, 5.0)
    assert (progress.generated.tolist(), progress.most.tolist()) == ([8.0], [99.0])
    outlook.renew(progress, np.array([91.0]), 1.0, 5.0)  # to its limit
    assert seen(outlook, number, 7.0) == [pytest.approx([1.0, 20.0, 20.0])]
    outlook.validate()


def test_an_instance_that_left_leaves_its_number_without_sequences() -> None:
    outlook = Outlook()
    first = outlook.join()
    slot = outlook.add(first, tokens=10, most=99, begins_at=0.0, step_s=1.0, expected=50.0)
    outlook.leave(first)
    second = outlook.join()
    assert second == first, "numbers are used again"
    outlook.advance(0.0)
    assert seen(outlook, second, 1.0) == [[0.0, 0.0, 0.0]]
    outlook.remove(slot)
    outlook.validate()


@dataclass
class Known:
    """A sequence as a plain record."""

    number: int
    tokens: float
    most: float
    begins_at: float
    as_of: float
    step_s: float
    end_rate: float
    generated: float = 0.0

    def at(self, instant: float, now: float) -> tuple[float, float, float]:
        passed = max(instant - self.as_of, 0.0)
        if passed >= (self.most - self.generated) * self.step_s:
            return 0.0, 0.0, 0.0
        likely = math.exp(-self.end_rate * min(passed, instant - now))
        held = likely * (self.tokens + self.generated + passed / self.step_s)
        return (likely, held, held) if instant >= self.begins_at else (0.0, 0.0, held)


class Sequences(RuleBasedStateMachine):
    """Two instances, looked at only where an instant lies: between them a line is drawn."""

    @initialize()
    def begin(self) -> None:
        self.outlook = Outlook()
        self.now = self.drawn_at = 0.0
        for _ in EVERY:
            self.outlook.join()
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
    def add(
        self, number: int, tokens: int, delay: float, step_s: float, expected: float, most: int
    ) -> None:
        begins_at = self.now + delay
        slot = self.outlook.add(
            number, tokens=tokens, most=most, begins_at=begins_at, step_s=step_s, expected=expected
        )
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
            self.outlook.advance(self.now + 1.0)  # too far from the last time: draws
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
        self.outlook.renew(progress, remaining, step_s, self.now)

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
        sums = self.outlook.at(instants, EVERY)
        for column, instant in enumerate(instants):
            if any(self.is_edge(known, instant) for known in self.known.values()):
                continue  # rounding decides on which side it lies
            for row, number in enumerate(EVERY.tolist()):
                own = [
                    k.at(instant, self.drawn_at) for k in self.known.values() if k.number == number
                ]
                for kind, found in enumerate(sums):
                    expected = sum(each[kind] for each in own)
                    assert found[column, row] == pytest.approx(expected, rel=1e-4, abs=1e-2)

    @staticmethod
    def is_edge(known: Known, instant: float) -> bool:
        ends_at = known.as_of + (known.most - known.generated) * known.step_s
        return min(abs(instant - known.begins_at), abs(instant - ends_at)) < 1e-6


TestSequences = Sequences.TestCase
