"""Tests of models that learn from reports: stated speed of convergence, stability under noise, impossible reports."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.conductor.prediction.accuracy import Accuracy, Term, Times
from moonserve.conductor.prediction.compute_time import (
    CORRECTION_CLIP,
    CORRECTION_WEIGHT,
    MAX_FACTOR,
    DecodeCorrection,
    DecodeCost,
    PrefillCorrection,
    PrefillCost,
    fit_decode,
    fit_prefill,
    report_errors,
)
from moonserve.conductor.prediction.learned_estimates import Overhead, Overtaking, RobustDuration
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile

NEAR = pytest.approx
SEEDS = st.integers(0, 2**32 - 1)
IMPOSSIBLE = [0.0, -1.0, math.nan, math.inf]

# ---- formulae

COEFFICIENTS = st.tuples(st.floats(0, 0.1), st.floats(1e-6, 1e-3), st.floats(0, 1e-7))


@given(COEFFICIENTS, SEEDS)
def test_fit_is_exact_for_exact_points_and_errs_by_the_noise_of_others(
    c: tuple[float, float, float], seed: int
) -> None:
    """Exact points are predicted to within 0.01 %, and 90 % of 200 points with 5 % noise to within 5 % of the truth."""
    random = np.random.default_rng(seed)
    n = random.integers(16, 100_000, 200)
    p = (n * random.random(200)).astype(np.int64)
    truth = PrefillProfile(c0=c[0], c1=c[1], c2=c[2]).seconds(n, p)
    fit = fit_prefill(n, p, truth)
    assert (fit.errors.max < 1e-4, fit.errors.num_points) == (True, 200)
    noisy = fit_prefill(n, p, truth * np.exp(random.normal(0, 0.05, 200)))
    assert np.quantile(np.abs(noisy.profile.seconds(n, p) / truth - 1), 0.9) < 0.05
    batches, contexts = np.array([1, 4, 16, 16, 64]), np.array([32, 128, 512, 16_384, 65_536])
    steps = c[0] + c[1] * batches + c[2] * contexts
    assert fit_decode(batches, contexts, steps).errors.max < 1e-4


def test_error_report_lists_the_worst_points_first() -> None:
    at = [(1, 0), (2, 0), (3, 0)]
    errors = report_errors(at, np.array([1.0, 1.0, 2.0]), np.array([1.1, 0.5, 2.0]))
    assert [residual.at for residual in errors.worst] == [(2, 0), (1, 0), (3, 0)]
    assert (errors.worst[0].relative, errors.p50, errors.max) == (NEAR(-0.5), NEAR(0.1), NEAR(0.5))
    nothing = np.array([], np.int64)
    with pytest.raises(InvalidRequest):
        fit_prefill(nothing, nothing, np.array([]))
    with pytest.raises(InvalidRequest):
        fit_decode(np.array([1]), np.array([1]), np.array([0.0]))


@given(linear=st.floats(0.5, 2.0), square=st.floats(0.5, 2.0), seed=SEEDS)
def test_correction_compensates_a_formula_of_wrong_shape(linear: float, square: float, seed: int) -> None:
    """80 reports correct linear and square coefficients wrong by different factors, for prompts of any length."""
    cost = PrefillCost(PrefillProfile(c0=2e-3, c1=4e-5, c2=5e-8))
    truth = PrefillProfile(c0=linear * 2e-3, c1=linear * 4e-5, c2=square * 5e-8)
    lengths = np.exp(np.random.default_rng(seed).uniform(np.log(50), np.log(8000), 80))
    for num_tokens in lengths.astype(int).tolist():
        cost.observe(num_tokens, 0, truth.seconds(num_tokens, 0))
        cost.validate()
    for num_tokens in (1000, 3000, 7000):
        assert cost.current.seconds(num_tokens, 0) == NEAR(truth.seconds(num_tokens, 0), rel=0.15)


def test_decode_correction_follows_reports_and_ignores_impossible_ones() -> None:
    prefill = PrefillCost(PrefillProfile(c0=0.01, c1=1e-4, c2=0.0))
    decode = DecodeCost(DecodeProfile(c0=0.01, c1=1e-3, c2=1e-7))
    for n, p in ((10, 10), (10, -1), (0, 0), (-5, -9)):
        prefill.observe(n, p, 9.0)
    for b, c in ((0, 10), (1, -1)):
        decode.observe(b, c, 9.0)
    assert (prefill.current, decode.current) == (prefill.profile, decode.profile)
    for _ in range(20):
        decode.observe(8, 4000, 2 * decode.profile.step_s(8, 4000))
    assert decode.current.step_s(4, 100) == NEAR(2 * decode.profile.step_s(4, 100), rel=0.05)
    decode.validate()


SECONDS = st.floats(1e-4, 10.0)


@given(usual=st.lists(st.tuples(SECONDS, SECONDS), min_size=30, max_size=30), wild=st.floats(0.0, 1e6))
def test_outlier_moves_predictions_by_a_bounded_share(usual: list[tuple[float, float]], wild: float) -> None:
    """A wild report about a prompt like the earlier ones changes the prediction for it by less than 40 %."""
    tracking = PrefillCorrection()
    for linear_s, square_s in usual * 2:
        tracking.observe(linear_s, square_s, linear_s + square_s)
    before = tracking.seconds(*usual[0])
    tracking.observe(*usual[0], wild)
    tracking.validate()
    assert abs(tracking.seconds(*usual[0]) / before - 1.0) < 0.4


def test_reports_of_one_kind_leave_the_other_factor_unchanged() -> None:
    tracking = PrefillCorrection()
    for _ in range(40):
        tracking.observe(0.1, 0.0, 0.2)
    assert (tracking.linear, tracking.square) == (NEAR(2.0, rel=0.05), 1.0)


@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats()), max_size=60))
def test_estimates_are_bounded_for_any_reports(reports: list[tuple[float, float, float]]) -> None:
    correction, tracking, middle = DecodeCorrection(), PrefillCorrection(), RobustDuration()
    for first, second, third in reports:
        correction.observe(first, second)
        tracking.observe(abs(first), abs(second), third)
        middle.observe(first)
        for each in (correction, tracking, middle):
            each.validate()
    assert math.isfinite(tracking.seconds(1.0, 1.0))


# ---- one factor


def reports_to_converge(change: float) -> int:
    """Returns how many noise-free reports bring the factor to within 5 % once a machine is `change` times slower."""
    distance, reports = abs(math.log(change)), 0
    while distance > math.log(1.05):
        distance -= CORRECTION_WEIGHT * min(distance, CORRECTION_CLIP)
        reports += 1
    return reports


def settled(log_factor: float) -> DecodeCorrection:
    correction = DecodeCorrection()
    for _ in range(200):
        correction.observe(1.0, math.exp(log_factor))
    return correction


@given(st.floats(0.26, 3.9), st.floats(1e-4, 1e3), st.floats(0.13, 7.9))
def test_factor_follows_a_change_after_the_documented_number_of_reports(
    before: float, predicted_s: float, after: float
) -> None:
    """The stated number of reports is enough for any earlier factor and any work. docs/cost-models.md states 15 reports
    for a factor of two and 27 for a factor of four."""
    assert [reports_to_converge(times) for times in (2.0, 0.5, 4.0, 1.0)] == [15, 15, 27, 0]
    correction = settled(math.log(before))
    for _ in range(reports_to_converge(after / before)):
        correction.observe(predicted_s, predicted_s * after)
    assert abs(math.log(correction.factor / after)) <= math.log(1.05) + 1e-6


@given(SEEDS, st.floats(0.02, CORRECTION_CLIP), st.floats(0.3, 3.0))
def test_noise_moves_the_factor_by_a_third_of_its_own_deviation(seed: int, sigma: float, truth: float) -> None:
    """Clipping can only lower the deviation. The bounds leave room for the error of 2,000 dependent samples."""
    correction, logs = settled(math.log(truth)), []
    for one in np.random.default_rng(seed).normal(0.0, sigma, 2_000).tolist():
        correction.observe(1.0, truth * math.exp(one))
        logs.append(math.log(correction.factor / truth))
    assert np.std(logs) <= 1.25 * sigma * math.sqrt(CORRECTION_WEIGHT / (2.0 - CORRECTION_WEIGHT))
    assert abs(np.mean(logs)) <= 0.15 * sigma


@given(st.floats(1e-300, 1e300), st.floats(1e-300, 1e300), st.floats(-2.0, 2.0))
def test_any_report_moves_the_factor_by_at_most_6_percent(predicted_s: float, actual_s: float, before: float) -> None:
    correction = settled(before)
    known = correction.factor
    correction.observe(predicted_s, actual_s)
    assert abs(math.log(correction.factor / known)) <= CORRECTION_WEIGHT * CORRECTION_CLIP + 1e-9


def test_invalid_times_are_ignored_and_the_factor_is_bounded() -> None:
    correction = DecodeCorrection()
    for odd in IMPOSSIBLE:
        correction.observe(1.0, odd)
        correction.observe(odd, 1.0)
    assert correction.factor == 1.0
    for _ in range(1_000):
        correction.observe(1.0, 1e6)
    assert correction.factor == NEAR(MAX_FACTOR)


# ---- overheads


def reported(overhead: Overhead, landing_s: float, *, lands_only: bool) -> None:
    """Observes a TTFT that is 6 ms more than the sum of its terms."""
    times = Times(ttft_s=1.506 + landing_s, queue_s=1.0, transfer_s=landing_s, prefill_s=0.5)
    overhead.observe(times, 0.0, lands_only=lands_only)
    overhead.validate()


def test_landing_overhead_counts_only_beyond_the_queue_time() -> None:
    overhead = Overhead()
    overhead.observe(Times(ttft_s=1.0), 0.0, lands_only=True)
    assert overhead.seconds(0.0) == 0.0, "before anything was reported, and after a report without terms"
    reported(overhead, 0.004, lands_only=True)
    for _ in range(20):
        reported(overhead, 3.0, lands_only=False)
    waits = {0.0: 0.010, 0.003: 0.007, 5.0: 0.006}
    assert [overhead.seconds(queue_s) for queue_s in waits] == NEAR(list(waits.values()))


@given(usual=st.floats(1e-3, 0.1), wild=st.lists(st.floats(-1.0, 100.0), max_size=3))
def test_robust_duration_ignores_outliers(usual: float, wild: list[float]) -> None:
    """Each wild report moves the middle by at most 6.2 % of the middle plus 0.1 ms."""
    middle = RobustDuration()
    for seconds in [usual] * 5 + wild:
        middle.observe(seconds)
    most, epsilon_s = 1.0619 ** len(wild), 1e-4
    found = (middle.seconds + epsilon_s) / (usual + epsilon_s)
    assert 1 / most <= found * 1.000001
    assert found <= most * 1.000001


# ---- overtaking


@pytest.mark.parametrize(
    ("seen", "lead_s", "deviations", "expected"),
    [
        ([], 3.0, 0.0, 0.0),
        ([(3.0, 4.0), (3.0, 6.0)], 2.5, 0.0, NEAR(5.0)),  # from similar leads
        ([(3.0, 4.0), (3.0, 6.0)], 0.2, 0.0, 0.0),  # and from no others
        ([(3.0, 4.0), (3.0, 6.0)], 50.0, 1.0, 0.0),
        ([(1.0, -3.0)], 1.0, 0.0, 0.0),  # never negative
        ([(1.0, 0.0)] * 1000 + [(1.0, 10.0)] * 200, 1.0, 0.0, NEAR(10.0, rel=0.03)),  # newer observations count more
        ([(4.0, 2.0), (4.0, 10.0)] * 500, 4.0, 1.0, NEAR(10.0, abs=0.2)),
        ([(1.0, 7.0)], 1.0, 3.0, 7.0),  # a single case has no deviation
        ([(0.0, 2.0)], 1e-9, 0.0, 2.0),
        ([(1e9, 2.0)], 1e9, 0.0, 2.0),
    ],
)
def test_forecast_error_repeats_earlier_ones(
    seen: list[tuple[float, float]], lead_s: float, deviations: float, expected: float
) -> None:
    overtaking = Overtaking()
    for each in seen:
        overtaking.observe(*each)
        overtaking.validate()
    assert overtaking.expected(lead_s, deviations) == expected


# ---- accuracy


@given(st.lists(st.floats(0.002, 50.0), min_size=1, max_size=60))
def test_quantiles_of_errors_are_numpy_s_within_5_percent(errors: list[float]) -> None:
    accuracy = Accuracy()
    for error in errors:
        accuracy.observe(Times(ttft_s=2.0 * (1.0 + error)), Times(ttft_s=2.0))
    found = accuracy.of(Term.TTFT)
    assert found is not None
    # The oldest of 60 weighs 0.81 times as much as the newest, so a quantile is off by at most a tenth of the ranks.
    for value, q in ((found.p50, 0.5), (found.p90, 0.9)):
        low = np.quantile(errors, max(q - 0.1, 0.0), method="inverted_cdf")
        high = np.quantile(errors, min(q + 0.1, 1.0), method="inverted_cdf")
        assert low / 1.05 <= value <= high * 1.05
    accuracy.validate()


def test_accuracy_forgets_old_errors_and_ignores_impossible_times() -> None:
    """Ten half-lives after a model became good, its reported errors are small. Impossible times are ignored."""
    accuracy = Accuracy()
    for actual_s in (0.0, -1.0, math.nan):
        accuracy.observe(Times(ttft_s=1.0), Times(ttft_s=actual_s))
    accuracy.observe(Times(ttft_s=math.inf), Times(ttft_s=1.0))
    assert accuracy.of(Term.TTFT) is None
    for predicted_s in [3.0] * 500 + [1.01] * 2000:
        accuracy.observe(Times(ttft_s=predicted_s), Times(ttft_s=1.0))
    found = accuracy.of(Term.TTFT)
    assert found is not None
    assert (found.p90, found.bias) == (NEAR(0.01, rel=0.05), NEAR(0.01, abs=0.01))
