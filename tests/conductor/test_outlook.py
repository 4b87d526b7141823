"""What will run at coming instants: the sums agree with every sequence looked at by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from conductor.outlook import INSTANTS, Outlook

EVERY = np.array([1, 2])


def test_a_sequence_is_held_from_its_placement_and_runs_from_its_begin_to_its_end() -> None:
    """100 tokens of prompt, from 2 s on a token per 0.1 s, 40 of them."""
    outlook = Outlook()
    number = outlook.join()
    outlook.advance(0.0)
    outlook.add(number, tokens=100, most=1000, begins_at=2.0, step_s=0.1, expected=40.0)
    seen = {
        instant: [float(s[0]) for s in outlook.at(instant, np.array([number]))]
        for instant in (0.0, 2.0, 4.0, 6.0, 500.0)
    }
    assert seen == {
        0.0: pytest.approx([0.0, 0.0, 100.0]),
        2.0: pytest.approx([1.0, 100.0, 100.0]),
        4.0: pytest.approx([1.0, 120.0, 120.0]),
        6.0: pytest.approx([0.0, 0.0, 0.0]),
        500.0: pytest.approx([0.0, 0.0, 0.0]),
    }


def test_a_first_token_that_comes_later_moves_the_end_as_well() -> None:
    outlook = Outlook()
    number = outlook.join()
    outlook.advance(0.0)
    slot = outlook.add(number, tokens=10, most=99, begins_at=1.0, step_s=1.0, expected=3.0)
    outlook.begin(slot, 4.0)
    assert outlook.at(6.0, np.array([number])).running == pytest.approx([1.0])
    assert outlook.drain(number, 4.0).ends_s.tolist() == pytest.approx([3.0])
    outlook.validate()


def test_what_should_have_ended_is_overdue_until_it_is_extended() -> None:
    outlook = Outlook()
    number = outlook.join()
    slot = outlook.add(number, tokens=10, most=99, begins_at=1.0, step_s=0.5, expected=4.0)
    outlook.advance(5.0)
    slots, generated, most = outlook.overdue(number, 5.0)
    assert (slots.tolist(), generated.tolist(), most.tolist()) == ([slot], [8], [99])
    outlook.extend(slots, np.array([6.0]), 5.0)
    assert not outlook.overdue(number, 5.0)[0].size
    assert outlook.at(7.0, np.array([number])).running == pytest.approx([1.0])
    outlook.validate()


def test_an_instance_that_left_leaves_its_number_without_sequences() -> None:
    outlook = Outlook()
    first = outlook.join()
    slot = outlook.add(first, tokens=10, most=99, begins_at=0.0, step_s=1.0, expected=50.0)
    outlook.leave(first)
    second = outlook.join()
    assert second == first, "numbers are used again"
    outlook.advance(0.0)
    assert outlook.at(1.0, np.array([second])).held_tokens == pytest.approx([0.0])
    outlook.remove(slot)
    outlook.validate()


class Sequences(RuleBasedStateMachine):
    """Two instances, looked at only where an instant lies: between them a line is drawn."""

    @initialize()
    def begin(self) -> None:
        self.outlook = Outlook()
        self.now = 0.0
        for _ in EVERY:
            self.outlook.join()
        self.known: dict[int, tuple[int, int, float, float, float]] = {}
        self.outlook.advance(self.now)

    @rule(
        number=st.sampled_from(EVERY.tolist()),
        tokens=st.integers(1, 1000),
        delay=st.floats(0, 40),
        step_s=st.floats(0.01, 2.0),
        expected=st.floats(1, 100),
    )
    def add(self, number: int, tokens: int, delay: float, step_s: float, expected: float) -> None:
        begins_at = self.now + delay
        slot = self.outlook.add(
            number, tokens=tokens, most=500, begins_at=begins_at, step_s=step_s, expected=expected
        )
        assert slot not in self.known
        self.known[slot] = (number, tokens, begins_at, begins_at + expected * step_s, step_s)

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        if self.known:
            slot = data.draw(st.sampled_from(sorted(self.known)))
            number, tokens, begins_at, ends_at, step_s = self.known[slot]
            self.outlook.begin(slot, self.now)
            self.known[slot] = (number, tokens, self.now, ends_at + self.now - begins_at, step_s)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.known:
            slot = data.draw(st.sampled_from(sorted(self.known)))
            self.outlook.remove(slot)
            del self.known[slot]

    @rule(number=st.sampled_from(EVERY.tolist()), remaining=st.floats(1, 50))
    def extend(self, number: int, remaining: float) -> None:
        slots, _, _ = self.outlook.overdue(number, self.now)
        for slot in slots.tolist():
            owner, tokens, begins_at, ends_at, step_s = self.known[slot]
            assert owner == number
            assert ends_at <= self.now + 1e-9
            self.known[slot] = (owner, tokens, begins_at, self.now + remaining * step_s, step_s)
        self.outlook.extend(slots, np.full(len(slots), remaining), self.now)

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.outlook.advance(self.now + 1.0)  # stale: draws
        self.outlook.advance(self.now)

    @invariant()
    def agrees(self) -> None:
        self.outlook.validate()
        assert len(self.outlook) == len(self.known)
        for instant in (self.now + INSTANTS).tolist():
            if any(
                abs(edge - instant) < 1e-6 for *_, b, e, _ in self.known.values() for edge in (b, e)
            ):
                continue  # rounding decides on which side it lies
            sums = self.outlook.at(instant, EVERY)
            for row, number in enumerate(EVERY.tolist()):
                mine = [rest for owner, *rest in self.known.values() if owner == number]
                left = [(t, b, s) for t, b, e, s in mine if instant < e]
                held = sum(t + max(instant - b, 0.0) / s for t, b, s in left)
                runs = [(t, b, s) for t, b, s in left if instant >= b]
                context = sum(t + (instant - b) / s for t, b, s in runs)
                assert sums.running[row] == pytest.approx(len(runs), abs=1e-3)
                assert sums.context_tokens[row] == pytest.approx(context, rel=1e-4, abs=1e-2)
                assert sums.held_tokens[row] == pytest.approx(held, rel=1e-4, abs=1e-2)


TestSequences = Sequences.TestCase
