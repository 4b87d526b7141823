"""Prefill and decode formulae: fitted to points, with a report of the errors; all candidates at once; corrected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.cost.decode import DecodeCost, fit_decode
from conductor.cost.prefill import PrefillCost, fit_prefill
from conductor.cost.residuals import report_errors
from conductor.policies.base import Offers, Prompt
from protocol.errors import InvalidRequest
from protocol.profile import DecodeProfile, PrefillProfile

_coefficients = st.tuples(st.floats(0, 0.1), st.floats(1e-6, 1e-3), st.floats(0, 1e-7))
_N = np.array([16, 64, 64, 512, 512, 4096, 4096, 100_000])
_P = np.array([0, 0, 32, 0, 480, 0, 4095, 50_000])


@given(_coefficients)
def test_a_prefill_fit_to_exact_points_predicts_them(c: tuple[float, float, float]) -> None:
    truth = PrefillProfile(c0=c[0], c1=c[1], c2=c[2])
    seconds = np.array([truth.seconds(n, p) for n, p in zip(_N.tolist(), _P.tolist(), strict=True)])
    fit = fit_prefill(_N, _P, seconds)
    assert fit.errors.max < 1e-4
    assert fit.errors.num_points == len(_N)


@given(_coefficients)
def test_a_decode_fit_to_exact_points_predicts_them(c: tuple[float, float, float]) -> None:
    truth = DecodeProfile(c0=c[0], c1=c[1], c2=c[2])
    batches, contexts = np.array([1, 4, 16, 16, 64]), np.array([32, 128, 512, 16_384, 65_536])
    steps = [truth.step_s(b, k) for b, k in zip(batches.tolist(), contexts.tolist(), strict=True)]
    assert fit_decode(batches, contexts, np.array(steps)).errors.max < 1e-4


@given(_coefficients, st.integers(0, 2**32 - 1))
def test_a_fit_through_noise_errs_by_the_noise(c: tuple[float, float, float], seed: int) -> None:
    """5 % of noise on 200 points: the truth is within 5 % of every prediction."""
    random = np.random.default_rng(seed)
    n = random.integers(1, 8192, 200)
    p = (n * random.random(200)).astype(np.int64)
    truth = c[0] + c[1] * (n - p) + c[2] * (n**2 - p**2)
    fit = fit_prefill(n, p, truth * np.exp(random.normal(0, 0.05, 200)))
    assert np.quantile(np.abs(fit.profile.seconds(n, p) / truth - 1), 0.9) < 0.05


def test_a_report_names_the_worst_points_first() -> None:
    at = [(1, 0), (2, 0), (3, 0)]
    errors = report_errors(at, np.array([1.0, 1.0, 2.0]), np.array([1.1, 0.5, 2.0]))
    assert [residual.at for residual in errors.worst] == [(2, 0), (1, 0), (3, 0)]
    assert errors.worst[0].relative == pytest.approx(-0.5)
    assert (errors.p50, errors.max) == (pytest.approx(0.1), pytest.approx(0.5))


def test_all_candidates_at_once_are_each_by_itself() -> None:
    """Columns of instances, one prompt; large enough for squares beyond 32 bits."""
    cached_blocks = np.array([0, 90])
    none, seconds = np.zeros(2, np.int64), np.zeros(2)
    offers = Offers(
        identity=np.zeros(2, np.uint64),
        chosen_at=none,
        device_blocks=none,
        prefix_blocks=cached_blocks,
        queue_s=seconds,
        local_s_per_block=seconds,
        remote_s_per_block=seconds,
        c0=np.array([0.01, 0.02]),
        c1=np.array([1e-4, 2e-4]),
        c2=np.array([1e-9, 0.0]),
        now=0.0,
        wait_s=lambda _row, _rank: 0.0,
    )
    prompt = Prompt(num_tokens=100_000, block_size=1_000, best_blocks=0)
    for row, predicted in enumerate(offers.prefill_s(prompt, cached_blocks)):
        profile = PrefillProfile(c0=offers.c0[row], c1=offers.c1[row], c2=offers.c2[row])
        assert predicted == pytest.approx(profile.seconds(100_000, (0, 90_000)[row]))


def test_costs_follow_a_machine_that_became_slower() -> None:
    prefill = PrefillCost(PrefillProfile(c0=0.01, c1=1e-4, c2=0.0))
    decode = DecodeCost(DecodeProfile(c0=0.01, c1=1e-3, c2=1e-7))
    for _ in range(20):
        prefill.observe(1000, 200, 2 * prefill.profile.seconds(1000, 200))
        decode.observe(8, 4000, 2 * decode.profile.step_s(8, 4000))
    assert prefill.seconds(500, 0) == pytest.approx(2 * prefill.profile.seconds(500, 0), rel=0.05)
    assert decode.step_s(4, 100) == pytest.approx(2 * decode.profile.step_s(4, 100), rel=0.05)
    prefill.validate()
    decode.validate()


@given(linear=st.floats(0.5, 2.0), square=st.floats(0.5, 2.0), seed=st.integers(0, 2**32 - 1))
def test_a_formula_that_is_wrong_in_its_shape_is_set_right(
    linear: float, square: float, seed: int
) -> None:
    """Both coefficients were measured badly, each by a factor of its own; prompts of all lengths are then predicted."""
    cost = PrefillCost(PrefillProfile(c0=2e-3, c1=4e-5, c2=5e-8))
    truth = PrefillProfile(c0=linear * 2e-3, c1=linear * 4e-5, c2=square * 5e-8)
    lengths = np.exp(np.random.default_rng(seed).uniform(np.log(50), np.log(8000), 80))
    for num_tokens in lengths.astype(int).tolist():
        cost.observe(num_tokens, 0, truth.seconds(num_tokens, 0))
        cost.validate()
    for num_tokens in (1000, 3000, 7000):
        assert cost.seconds(num_tokens, 0) == pytest.approx(truth.seconds(num_tokens, 0), rel=0.15)


def test_impossible_reports_are_ignored() -> None:
    prefill, decode = (
        PrefillCost(PrefillProfile(c0=0.01, c1=1e-4, c2=0.0)),
        DecodeCost(DecodeProfile(c0=0.01, c1=1e-3, c2=1e-7)),
    )
    for n, p in ((10, 10), (10, -1), (0, 0), (-5, -9)):
        prefill.observe(n, p, 9.0)
    decode.observe(0, 10, 9.0)
    decode.observe(1, -1, 9.0)
    assert (prefill.tracking.num_reports, decode.correction.num_reports) == (0, 0)


def test_no_points_cannot_be_fitted() -> None:
    nothing = np.array([], np.int64)
    with pytest.raises(InvalidRequest):
        fit_prefill(nothing, nothing, np.array([]))
    with pytest.raises(InvalidRequest):
        fit_decode(np.array([1]), np.array([1]), np.array([0.0]))
