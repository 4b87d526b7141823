"""Three errors in ten seconds rest a rail; a trial after the rest decides whether it is longer next time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transfer.rails.health import Condition, HealthEvent, RailHealth, RestRule

RULE = RestRule()


def rest(health: RailHealth, key: str, now: float) -> float:
    """Three errors; returns the time at which the rest has just begun."""
    for at in (now, now + 1, now + 2):
        event = health.failed(key, at)
    assert event is HealthEvent.RESTED
    return now + 2


def test_three_errors_within_ten_seconds_rest_a_rail_for_thirty() -> None:
    health = RailHealth()
    assert health.failed("a", 0.0) is None
    assert health.failed("a", 5.0) is None
    assert health.condition("a", 9.0) is Condition.HEALTHY
    assert health.failed("a", 10.0) is HealthEvent.RESTED
    assert health.condition("a", 39.9) is Condition.RESTING
    assert health.condition("a", 40.0) is Condition.TRIAL
    assert health.condition("b", 11.0) is Condition.HEALTHY


def test_errors_that_are_further_apart_do_not_add_up() -> None:
    health = RailHealth()
    for at in (0.0, 5.1, 10.2, 15.3, 20.4):
        assert health.failed("a", at) is None
    assert health.condition("a", 20.4) is Condition.HEALTHY


def test_the_slices_of_one_broken_connection_are_one_error() -> None:
    health = RailHealth()
    for _ in range(64):
        assert health.failed("a", 1.0) is None
    assert health.failed("a", 2.0) is None
    assert health.failed("a", 3.0) is HealthEvent.RESTED


def test_what_was_sent_before_the_rest_neither_lengthens_nor_ends_it() -> None:
    health = RailHealth()
    began = rest(health, "a", 0.0)
    assert health.failed("a", began + 1) is None
    assert health.succeeded("a", began + 2) is None
    assert health.rest_ends_at("a") == began + 30.0
    assert health.condition("a", began + 29.9) is Condition.RESTING


def test_the_first_success_after_a_rest_heals_and_the_next_rest_is_short_again() -> None:
    health = RailHealth()
    began = rest(health, "a", 0.0)
    assert health.failed("a", began + 31) is HealthEvent.RESTED
    assert health.rest_ends_at("a") == began + 31 + 60
    assert health.succeeded("a", began + 92) is HealthEvent.HEALED
    assert health.condition("a", began + 92) is Condition.HEALTHY
    assert health.all_healthy
    began = rest(health, "a", began + 100)
    assert health.rest_ends_at("a") == began + 30
    assert health.events == {HealthEvent.RESTED: 3, HealthEvent.HEALED: 1}


def test_each_failed_trial_doubles_the_rest_up_to_five_minutes() -> None:
    health = RailHealth()
    now = rest(health, "a", 0.0)
    lengths = []
    for _ in range(6):
        ends_at = health.rest_ends_at("a")
        assert ends_at is not None
        lengths.append(ends_at - now)
        now = ends_at
        health.failed("a", now)
    assert lengths == [30, 60, 120, 240, 300, 300]


def test_a_rail_whose_errors_are_old_costs_nothing_again() -> None:
    health = RailHealth()
    health.failed("a", 0.0)
    health.succeeded("a", 5.0)
    assert not health.all_healthy
    health.succeeded("a", 10.1)
    assert health.all_healthy


def test_what_is_forgotten_is_healthy() -> None:
    health = RailHealth()
    rest(health, "a", 0.0)
    health.forget(["a", "never seen"])
    assert health.condition("a", 3.0) is Condition.HEALTHY
    health.validate()


class Model:
    """The rule once more, from the whole history of one key."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.rest_ends_at: float | None = None
        self.lengths = lengths()

    def failed(self, now: float) -> None:
        if self.rest_ends_at is not None:
            if now >= self.rest_ends_at:
                self.rest_ends_at = now + next(self.lengths)
            return
        if not self.errors or now - self.errors[-1] >= RULE.same_incident_s:
            self.errors.append(now)
        if len([at for at in self.errors if now - at <= RULE.within_s]) >= RULE.errors:
            self.rest_ends_at = now + next(self.lengths)

    def succeeded(self, now: float) -> None:
        if self.rest_ends_at is not None and now >= self.rest_ends_at:
            self.__init__()  # type: ignore[misc]  # healed: as if it were new

    def condition(self, now: float) -> Condition:
        if self.rest_ends_at is None:
            return Condition.HEALTHY
        return Condition.RESTING if now < self.rest_ends_at else Condition.TRIAL


def lengths() -> Iterator[float]:
    return (min(RULE.first_rest_s * 2**n, RULE.longest_rest_s) for n in count())


class HealthMachine(RuleBasedStateMachine):
    """Random reports about three keys; the implementation always agrees with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.health = RailHealth()
        self.models = {key: Model() for key in range(3)}
        self.now = 0.0

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.05, 1.0, 4.0, 10.0, 29.0, 31.0, 301.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=st.integers(0, 2))
    def fail(self, key: int) -> None:
        self.health.failed(key, self.now)
        self.models[key].failed(self.now)

    @rule(key=st.integers(0, 2))
    def succeed(self, key: int) -> None:
        self.health.succeeded(key, self.now)
        self.models[key].succeeded(self.now)

    @invariant()
    def agree(self) -> None:
        self.health.validate()
        for key, model in self.models.items():
            assert self.health.condition(key, self.now) is model.condition(self.now)
            assert self.health.rest_ends_at(key) == model.rest_ends_at


TestHealthMachine = HealthMachine.TestCase


@given(st.lists(st.floats(0.0, 40.0), min_size=1, max_size=200))
def test_once_rested_a_rail_that_only_fails_gets_one_trial_per_rest(gaps: list[float]) -> None:
    health, now, trials = RailHealth(), rest(RailHealth(), "a", 0.0), 0
    rest(health, "a", 0.0)
    for gap in gaps:
        now += gap
        if health.condition("a", now) is not Condition.RESTING:
            health.failed("a", now)
            trials += 1
    assert trials == health.events[HealthEvent.RESTED] - 1
    assert now - 2 >= sum(min(30 * 2**n, 300) for n in range(trials))


@pytest.mark.parametrize("errors", [1, 2, 5])
def test_the_numbers_can_be_changed(errors: int) -> None:
    health = RailHealth(RestRule(errors=errors, first_rest_s=1.0))
    events = [health.failed("a", float(at)) for at in range(errors)]
    assert events[-1] is HealthEvent.RESTED
    assert health.rest_ends_at("a") == errors
