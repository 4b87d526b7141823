"""Three errors in ten seconds rest a rail; a trial after the rest decides whether it is longer next time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transfer.paths.health import Condition, RailHealth, RestRule

RULE = RestRule()


def test_the_numbers_are_those_of_the_publication() -> None:
    """Three errors within ten seconds rest a rail for thirty; each failed trial doubles that, up to five minutes."""
    health = RailHealth()
    assert [health.failed("a", at) for at in (0.0, 5.0, 10.1, 15.2)] == [False] * 4
    assert health.failed("a", 15.3)
    assert health.condition("b", 15.3) is Condition.HEALTHY
    health.succeeded("a", 16.0)  # what was sent before the rest neither ends nor lengthens it
    assert not health.failed("a", 17.0)
    assert health.condition("a", 45.2) is Condition.RESTING
    assert health.condition("a", 45.3) is Condition.TRIAL
    now, lengths = 15.3, []
    for _ in range(6):
        ends_at = health.rest_ends_at("a")
        assert ends_at is not None
        lengths.append(round(ends_at - now))
        now = ends_at
        assert health.failed("a", now)
    assert lengths == [30, 60, 120, 240, 300, 300]


class Model:
    """The rule once more, from the whole history of one key."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.rest_ends_at: float | None = None
        self.lengths = lengths()

    def failed(self, now: float) -> bool:
        if self.rest_ends_at is None:
            if not self.errors or now - self.errors[-1] >= RULE.same_incident_s:
                self.errors.append(now)
            if len([at for at in self.errors if now - at <= RULE.within_s]) < RULE.errors:
                return False
        elif now < self.rest_ends_at:
            return False
        self.rest_ends_at = now + next(self.lengths)
        return True

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

    @rule(key=st.integers(0, 2), times=st.integers(1, 3))
    def fail(self, key: int, times: int) -> None:
        for _ in range(times):
            self.now += 0.05
            assert self.health.failed(key, self.now) == self.models[key].failed(self.now)

    @rule(key=st.integers(0, 2))
    def succeed(self, key: int) -> None:
        self.health.succeeded(key, self.now)
        self.models[key].succeeded(self.now)

    @rule()
    def forget_what_is_old(self) -> None:
        """A key whose errors are old costs nothing again once it has succeeded."""
        self.now += 301.0
        for key in range(3):
            self.succeed(key)
        assert self.health.all_healthy

    @invariant()
    def agree(self) -> None:
        self.health.validate()
        for key, model in self.models.items():
            assert self.health.condition(key, self.now) is model.condition(self.now)
            assert self.health.rest_ends_at(key) == model.rest_ends_at


TestHealthMachine = HealthMachine.TestCase
