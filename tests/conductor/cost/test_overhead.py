"""What first tokens report beside the terms of Algorithm 1 is expected of the next ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.cost.accuracy import Times
from conductor.cost.overhead import Middle, Overhead

NEAR = pytest.approx


def reported(
    overhead: Overhead, rest_s: float, landing_s: float, *, lands_only: bool = True
) -> None:
    ttft_s = 1.0 + 0.5 + landing_s + rest_s
    actual = Times(ttft_s=ttft_s, queue_s=1.0, transfer_s=landing_s, prefill_s=0.5)
    overhead.observe(actual, 0.0, lands_only=lands_only)
    overhead.validate()


def test_nothing_is_added_before_anything_was_reported() -> None:
    assert Overhead().seconds(0.0) == 0.0


def test_a_landing_delays_only_who_does_not_wait_anyway() -> None:
    overhead = Overhead()
    reported(overhead, 0.006, 0.004)
    assert overhead.seconds(0.0) == NEAR(0.010)
    assert overhead.seconds(0.003) == NEAR(0.007)
    assert overhead.seconds(5.0) == NEAR(0.006)


def test_a_loaded_prefix_or_a_full_pool_says_nothing_of_landings() -> None:
    overhead = Overhead()
    reported(overhead, 0.006, 0.004)
    for _ in range(20):
        reported(overhead, 0.006, 3.0, lands_only=False)
    assert overhead.seconds(0.0) == NEAR(0.010)


@given(
    usual=st.floats(1e-3, 0.1),
    wild=st.lists(st.floats(-1.0, 100.0), max_size=3),
)
def test_the_middle_follows_what_is_usual_and_not_what_is_wild(
    usual: float, wild: list[float]
) -> None:
    """Each wild report moves it by at most 6.2 %, and that of a tenth of a millisecond more."""
    middle = Middle()
    for seconds in [usual] * 5 + wild:
        middle.observe(seconds)
        middle.validate()
    most, epsilon_s = 1.0619 ** len(wild), 1e-4
    assert (usual + epsilon_s) / most <= (middle.seconds + epsilon_s) * 1.000001
    assert middle.seconds + epsilon_s <= (usual + epsilon_s) * most * 1.000001


def test_a_report_without_terms_says_nothing() -> None:
    overhead = Overhead()
    overhead.observe(Times(ttft_s=1.0), 0.0, lands_only=True)
    assert overhead.seconds(0.0) == 0.0


def test_times_that_are_none_say_nothing() -> None:
    middle = Middle()
    middle.observe(float("nan"))
    middle.observe(float("inf"))
    assert middle.seconds == 0.0
