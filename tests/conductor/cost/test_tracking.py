"""Two factors of one instance: they follow what is reported, and no report owns them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.cost.tracking import Tracking

NEAR = pytest.approx
seconds = st.floats(1e-4, 10.0)


def test_the_formula_holds_until_something_is_reported() -> None:
    assert Tracking().seconds(1.0, 2.0) == 3.0


def test_what_is_only_of_one_kind_leaves_the_other_factor_alone() -> None:
    tracking = Tracking()
    for _ in range(40):
        tracking.observe(0.1, 0.0, 0.2)
        tracking.validate()
    assert (tracking.linear, tracking.square) == (NEAR(2.0, rel=0.05), 1.0)


@given(
    usual=st.lists(st.tuples(seconds, seconds), min_size=30, max_size=30),
    wild=st.floats(0.0, 1e6),
)
def test_one_wild_report_among_usual_ones_moves_predictions_by_a_bounded_share(
    usual: list[tuple[float, float]], wild: float
) -> None:
    """Of a prompt that is like those before it."""
    tracking = Tracking()
    for linear_s, square_s in usual * 2:
        tracking.observe(linear_s, square_s, linear_s + square_s)
    before = tracking.seconds(*usual[0])
    tracking.observe(*usual[0], wild)
    tracking.validate()
    assert abs(tracking.seconds(*usual[0]) / before - 1.0) < 0.4


@given(
    reports=st.lists(
        st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.floats()),
        max_size=60,
    )
)
def test_factors_stay_within_bounds_whatever_is_reported(
    reports: list[tuple[float, float, float]],
) -> None:
    tracking = Tracking()
    for linear_s, square_s, actual_s in reports:
        tracking.observe(linear_s, square_s, actual_s)
        tracking.validate()
    assert math.isfinite(tracking.seconds(1.0, 1.0))
