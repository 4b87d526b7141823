"""The online factor: it converges at the stated speed, is steady under noise, follows drift, survives lies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.cost.correction import CLIP, MOST, WEIGHT, Correction, reports_to_converge

_seeds = st.integers(0, 2**32 - 1)


def _settled(log_factor: float) -> Correction:
    correction = Correction()
    for _ in range(200):
        correction.observe(1.0, math.exp(log_factor))
    return correction


@given(st.floats(0.26, 3.9), st.floats(1e-4, 1e3), st.floats(0.13, 7.9))
def test_a_changed_machine_is_known_after_the_stated_number_of_reports(
    before: float, predicted_s: float, after: float
) -> None:
    """Whatever the factor was, and whatever the work."""
    correction = _settled(math.log(before))
    for _ in range(reports_to_converge(after / before, 0.05)):
        correction.observe(predicted_s, predicted_s * after)
        correction.validate()
    assert abs(math.log(correction.factor / after)) <= math.log(1.05) + 1e-6


def test_the_stated_speeds_are_those_of_the_documentation() -> None:
    assert reports_to_converge(2.0, 0.05) == 15
    assert reports_to_converge(0.5, 0.05) == 15
    assert reports_to_converge(4.0, 0.05) == 27
    assert reports_to_converge(1.0, 0.05) == 0


@given(_seeds, st.floats(0.02, CLIP), st.floats(0.3, 3.0))
def test_noise_moves_the_factor_by_a_third_of_its_own_deviation(
    seed: int, sigma: float, truth: float
) -> None:
    """Clipping only ever makes it steadier. The bounds leave room for 2,000 dependent samples."""
    noise = np.random.default_rng(seed).normal(0.0, sigma, 2_000)
    correction = _settled(math.log(truth))
    logs = []
    for one in noise.tolist():
        correction.observe(1.0, truth * math.exp(one))
        logs.append(math.log(correction.factor / truth))
    assert np.std(logs) <= 1.25 * sigma * math.sqrt(WEIGHT / (2.0 - WEIGHT))
    assert abs(np.mean(logs)) <= 0.15 * sigma


@given(_seeds, st.floats(0.05, 0.3))
def test_a_twice_slower_machine_is_known_through_noise(seed: int, sigma: float) -> None:
    """After twice the reports that it takes without noise, the error is the noise's alone (five deviations)."""
    noise = np.random.default_rng(seed).normal(0.0, sigma, 2 * reports_to_converge(2.0, 0.05))
    correction = _settled(0.0)
    for one in noise.tolist():
        correction.observe(1.0, 2.0 * math.exp(one))
    assert abs(math.log(correction.factor / 2.0)) <= 0.05 + 5 * sigma / 3


@given(st.floats(-0.04, 0.04))
def test_a_steady_drift_is_followed_at_a_constant_distance(drift: float) -> None:
    """The machine changes by `drift` per report (up to 4 %): the factor lags by (1−w)/w of them, 4."""
    correction = Correction()
    truth = 0.0
    for _ in range(50):
        truth += drift
        correction.observe(1.0, math.exp(truth))
        assert abs(math.log(correction.factor) - truth) <= abs(drift) * (1 - WEIGHT) / WEIGHT + 1e-9


@given(st.floats(1e-300, 1e300), st.floats(1e-300, 1e300), st.floats(-2.0, 2.0))
def test_one_report_however_wild_moves_the_factor_by_at_most_6_percent(
    predicted_s: float, actual_s: float, settled: float
) -> None:
    correction = _settled(settled)
    before = correction.factor
    correction.observe(predicted_s, actual_s)
    correction.validate()
    assert abs(math.log(correction.factor / before)) <= WEIGHT * CLIP + 1e-9


@given(_seeds)
def test_one_report_in_ten_may_lie(seed: int) -> None:
    """A tenth of the reports is 1,000 times too long: the bias stays below 10 %."""
    random = np.random.default_rng(seed)
    correction = Correction()
    logs = []
    for _ in range(1_000):
        lie = 1_000.0 if random.random() < 0.1 else 1.0
        correction.observe(1.0, lie * math.exp(random.normal(0.0, 0.05)))
        logs.append(math.log(correction.factor))
    assert np.mean(logs) <= math.log(1.1)


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=60))
def test_any_reports_leave_a_bounded_factor(reports: list[tuple[float, float]]) -> None:
    correction = Correction()
    for predicted_s, actual_s in reports:
        correction.observe(predicted_s, actual_s)
        correction.validate()
    assert math.isfinite(correction.factor)


@pytest.mark.parametrize("actual_s", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_says_nothing(actual_s: float) -> None:
    correction = Correction()
    correction.observe(1.0, actual_s)
    correction.observe(actual_s, 1.0)
    assert (correction.factor, correction.num_reports) == (1.0, 0)


def test_the_factor_stops_at_its_bound() -> None:
    correction = Correction()
    for _ in range(1_000):
        correction.observe(1.0, 1e6)
    assert correction.factor == pytest.approx(MOST)
