"""Three errors in ten seconds rest a rail; a trial after the rest decides whether it is longer next time."""

from __future__ import annotations

from transfer.paths.health import Condition, RailHealth


def rested(at: float = 0.0) -> RailHealth:
    """ "a" rests from two seconds after `at` on."""
    health = RailHealth()
    assert [health.failed("a", at + n) for n in range(3)] == [False, False, True]
    return health


def test_three_errors_within_ten_seconds_rest_a_rail_for_thirty_and_no_other() -> None:
    health = RailHealth()
    assert [health.failed("a", at) for at in (0.0, 5.0, 10.1, 15.2)] == [False] * 4
    assert health.failed("a", 15.3)
    assert health.condition("b", 15.3) is Condition.HEALTHY
    health.succeeded("a", 16.0)  # what was sent before the rest neither ends nor lengthens it
    assert not health.failed("a", 17.0)
    assert health.condition("a", 45.2) is Condition.RESTING
    assert health.condition("a", 45.3) is Condition.TRIAL
    health.validate()


def test_each_failed_trial_doubles_the_rest_up_to_five_minutes() -> None:
    health, now, lengths = rested(), 2.0, []
    for _ in range(6):
        ends_at = health.rest_ends_at("a")
        assert ends_at is not None
        lengths.append(round(ends_at - now))
        now = ends_at
        assert health.failed("a", now)
        health.validate()
    assert lengths == [30, 60, 120, 240, 300, 300]


def test_a_trial_that_succeeds_forgets_everything() -> None:
    health = rested()
    health.succeeded("a", 32.0)
    assert health.all_healthy
    assert [health.failed("a", at) for at in (33.0, 34.0, 35.0)] == [False, False, True]
    assert health.rest_ends_at("a") == 65.0


def test_what_fails_at_once_is_one_incident() -> None:
    health = RailHealth()
    assert not any(health.failed("a", 0.01 * n) for n in range(5))
    assert [health.failed("a", at) for at in (0.06, 0.12)] == [False, True]


def test_errors_that_are_old_are_forgotten_with_the_next_success() -> None:
    health = RailHealth()
    health.failed("a", 0.0)
    health.succeeded("a", 10.0)
    assert not health.all_healthy
    health.succeeded("a", 10.1)
    assert health.all_healthy
