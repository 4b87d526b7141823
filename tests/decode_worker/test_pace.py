"""How a worker learns that its steps take longer than its profiles say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.composition import Pace


def after(*ratios: float) -> float:
    pace = Pace()
    for ratio in ratios:
        pace.observe(0.01, 0.01 * ratio)
    return pace.factor


def test_steps_that_agree_are_believed_and_forgotten_again_and_short_ones_promise_nothing() -> None:
    assert after(*[3.0] * 100) == pytest.approx(3.0, rel=0.01)
    assert after(*[3.0] * 100, *[1.0] * 100) == pytest.approx(1.0, rel=0.01)
    assert after(1_000.0) < 1.2, "one stall moves it little"
    assert after(*[0.1] * 100) == 1.0


@given(
    st.lists(st.tuples(st.floats(allow_nan=True, allow_infinity=True), st.floats(allow_nan=True, allow_infinity=True)))
)
def test_whatever_is_told_the_factor_is_usable(steps: list[tuple[float, float]]) -> None:
    pace = Pace()
    for predicted_s, actual_s in steps:
        pace.observe(predicted_s, actual_s)
    assert 1.0 <= pace.factor < math.inf
