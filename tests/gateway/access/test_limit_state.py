"""Limits as a state machine in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.access.key_record import KeyLimits
from gateway.access.limit_state import Bucket, LimitState
from tests.thoroughness import examples

LIMITS = KeyLimits(requests_per_minute=5, tokens_per_minute=1_000, streams=3)


@given(capacity=st.integers(1, 10**6), takes=st.lists(st.tuples(st.floats(0, 30), st.floats(0, 1)), max_size=40))
def test_in_no_time_more_is_taken_than_a_bucket_and_what_refills(
    capacity: int, takes: list[tuple[float, float]]
) -> None:
    bucket, now, taken = Bucket(), 0.0, []
    for gap, share in takes:
        now += gap
        amount = share * capacity
        if bucket.wait_s(amount, capacity, now) == 0.0:
            bucket = bucket.after(amount, capacity, now)
            taken.append((now, amount))
    for first, (begin, _) in enumerate(taken):
        total = 0.0
        for at, amount in taken[first:]:
            total += amount
            assert total <= capacity * (1 + (at - begin) / 60) * (1 + 1e-7) + 1e-6


@given(capacity=st.integers(1, 10**6), debt=st.floats(0, 5), share=st.floats(0, 1), now=st.floats(0, 10**6))
def test_who_comes_back_when_told_is_let_in_and_a_moment_before_not(
    capacity: int, debt: float, share: float, now: float
) -> None:
    bucket = Bucket().after(debt * capacity, capacity, now)
    wait_s = bucket.wait_s(share * capacity, capacity, now)
    assert bucket.wait_s(share * capacity, capacity, now + wait_s) == pytest.approx(0, abs=1e-6)
    if wait_s > 0.01:
        assert bucket.wait_s(share * capacity, capacity, now + wait_s - 0.01) > 0


@dataclass
class Books:
    """What one key has had, kept the long way: charges by instant, and what is under way."""

    charges: list[tuple[float, int]] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    under_way: dict[str, int] = field(default_factory=dict)


class Limits(RuleBasedStateMachine):
    """Random requests of two keys; tokens are never more than a bucket holds."""

    def __init__(self) -> None:
        super().__init__()
        self.state = LimitState()
        self.now = 0.0
        self.books = {"a": Books(), "b": Books()}
        self.count = 0

    @rule(seconds=st.floats(0, 90))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=st.sampled_from("ab"), tokens=st.integers(0, 1_000))
    def ask(self, key: str, tokens: int) -> None:
        books, self.count = self.books[key], self.count + 1
        verdict = self.state.admit(key, str(self.count), LIMITS, tokens, self.now)
        if len(books.under_way) == 3:
            assert verdict.refused_by is not None
        if verdict.refused_by is None:
            books.under_way[str(self.count)] = tokens
            books.requests.append(self.now)
            books.charges.append((self.now, tokens))
        else:
            assert verdict.retry_after_s > 0
            after = self.now + verdict.retry_after_s + 1e-6
            again = self.state.look(key, LIMITS, after)
            if verdict.refused_by == "requests":
                assert again.refused_by in (None, "streams")

    @precondition(lambda self: any(books.under_way for books in self.books.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        live = [(key, id) for key, books in self.books.items() for id in books.under_way]
        key, request_id = data.draw(st.sampled_from(live))
        charged = self.books[key].under_way.pop(request_id)
        took = data.draw(st.integers(0, charged))
        self.state.settle(key, request_id, LIMITS, took, self.now)
        self.state.settle(key, request_id, LIMITS, 999, self.now)  # again: nothing happens

    @rule()
    def tidy(self) -> None:
        self.state.forget_idle(self.now)

    @invariant()
    def nobody_has_had_too_much(self) -> None:
        self.state.validate()
        for books in self.books.values():
            assert len(books.under_way) <= 3
            for first, begin in enumerate(books.requests):
                for nth, at in enumerate(books.requests[first:], 1):
                    assert nth <= 5 * (1 + (at - begin) / 60) + 1e-6

    @invariant()
    def what_is_under_way_is_known(self) -> None:
        mine = {(key, id) for key, books in self.books.items() for id in books.under_way}
        assert set(self.state.under_way()) == mine


TestLimits = Limits.TestCase
TestLimits.settings = settings(deadline=None, stateful_step_count=40, max_examples=examples(60))


def test_what_was_expected_and_not_taken_is_given_back_and_more_is_a_debt() -> None:
    state, limits = LimitState(), KeyLimits(tokens_per_minute=600)
    assert state.admit("k", "1", limits, 600, 0.0).tokens.remaining == 0
    assert state.admit("k", "2", limits, 1, 0.0).refused_by == "tokens"
    state.settle("k", "1", limits, 100, 0.0)
    assert state.look("k", limits, 0.0).tokens.remaining == 500
    state.admit("k", "3", limits, 500, 0.0)
    state.settle("k", "3", limits, 800, 0.0)
    owing = state.admit("k", "4", limits, 100, 0.0)
    assert owing.refused_by == "tokens"
    assert owing.retry_after_s == pytest.approx(40.0)  # 300 owed and 100 wanted, at 10 a second
    assert state.admit("k", "4", limits, 100, 40.0).refused_by is None
    # More than a whole bucket waits for a full one.
    assert state.admit("k", "5", limits, 5_000, 94.0).retry_after_s == pytest.approx(6.0)
    assert state.admit("k", "5", limits, 5_000, 100.0).refused_by is None


def test_what_another_refused_is_as_if_it_had_not_been() -> None:
    state = LimitState()
    before = state.look("k", LIMITS, 0.0)
    state.admit("k", "1", LIMITS, 700, 0.0)
    state.withdraw("k", "1", LIMITS, 0.0)
    assert state.look("k", LIMITS, 0.0) == before
    state.forget_idle(0.0)
    assert len(state) == 0


def test_the_limit_that_takes_longest_is_told() -> None:
    state = LimitState()
    for number in range(3):
        state.admit("k", str(number), LIMITS, 300, 0.0)
    verdict = state.admit("k", "3", LIMITS, 1_000, 0.0)
    assert (verdict.refused_by, verdict.retry_after_s) == ("tokens", pytest.approx(54.0))
    assert state.admit("k", "3", LIMITS, 0, 0.0).refused_by == "streams"
    assert (verdict.requests.remaining, verdict.tokens.remaining) == (2, 100)
    assert verdict.requests.reset_s == pytest.approx(36.0)
