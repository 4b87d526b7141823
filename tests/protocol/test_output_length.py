"""Tests of output lengths: against numpy on random streams, with limits, with drift, in bounded memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.protocol.output_length import (
    EDGES,
    MAX_TENANTS,
    MAX_TOKENS,
    MIN_OBSERVATIONS,
    LengthCurve,
    OutputLengths,
)

_ENDLESS = 1e9  # half-life so long that nothing fades, as in numpy
_lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=60)


def curve_of(lengths: list[int], half_life: float = _ENDLESS) -> LengthCurve:
    curve = LengthCurve(half_life)
    for length in lengths:
        curve.observe(length, stopped=False)
    return curve


def remaining(curve: LengthCurve, generated: int, max_tokens: int = MAX_TOKENS) -> float:
    return float(curve.mean_remaining(np.array(generated), np.array(max_tokens)))


def bin_of(length: int) -> tuple[int, int]:
    """Returns the least and greatest length in the bin of `length`."""
    top = int(np.searchsorted(EDGES, length))
    return int(EDGES[top - 1]) + 1, int(EDGES[top])


def test_bins_are_one_token_up_to_16_and_then_9_percent() -> None:
    assert EDGES[:18].tolist() == [*range(17), 17]
    assert EDGES[-1] == MAX_TOKENS
    widths = np.diff(EDGES)
    assert (widths >= 1).all()
    assert (widths[17:] / EDGES[17:-1] < 0.12).all()
    assert {2**n for n in range(21)} <= set(EDGES.tolist())


@given(_lengths, st.integers(0, len(EDGES) - 1))
def test_mean_remaining_equals_numpy_within_a_bin(lengths: list[int], edge: int) -> None:
    """At the edge of a bin, where the longer outputs are known exactly, the mean is numpy's to within a bin."""
    generated = int(EDGES[edge])
    longer = np.array([length for length in lengths if length > generated])
    curve = curve_of(lengths)
    if not longer.size:
        assert remaining(curve, generated) == min(max(generated, 1), MAX_TOKENS - generated)
        return
    lows, highs = zip(*map(bin_of, longer.tolist()), strict=True)
    found = generated + remaining(curve, generated)
    assert np.mean(lows) - 1e-6 <= found <= np.mean(highs) + 1e-6


@given(_lengths, st.integers(0, 6000), st.integers(1, 6000))
def test_mean_remaining_is_between_one_token_and_the_limit(lengths: list[int], generated: int, max_tokens: int) -> None:
    curve = curve_of(lengths)
    found = remaining(curve, generated, max_tokens)
    if generated >= max_tokens:
        assert found == 0.0
    else:
        assert 1.0 - 1e-9 <= found <= max_tokens - generated
    curve.validate()


@given(_lengths, st.integers(1, 6000))
def test_limit_cuts_the_mean_like_each_length(lengths: list[int], limit: int) -> None:
    expected = np.minimum(lengths, limit).mean()
    assert remaining(curve_of(lengths), 0, limit) == pytest.approx(expected, rel=0.1, abs=1.0)


@given(st.integers(0, 2**32 - 1), st.floats(3.0, 7.0), st.floats(0.3, 1.2))
def test_low_limits_do_not_make_answers_look_short(seed: int, mean: float, sigma: float) -> None:
    """Half of 4,000 lognormal outputs get a random limit. The curve is still that of the uncut outputs, as far as the
    highest limit allows."""
    random = np.random.default_rng(seed)
    lengths = np.maximum(np.round(random.lognormal(mean, sigma, 4000)), 1).astype(int)
    limits = np.where(random.random(4000) < 0.5, lengths * 2, random.lognormal(mean, sigma, 4000))
    limits = np.maximum(np.round(limits), 1).astype(int)
    curve = LengthCurve(_ENDLESS)
    for length, limit in zip(lengths.tolist(), limits.tolist(), strict=True):
        curve.observe(min(length, limit), stopped=length >= limit)
    survival = curve.survival_with_running(np.array([], np.int64))
    for q in (0.25, 0.5, 0.75):
        at = int(np.searchsorted(EDGES, np.quantile(lengths, q)))
        assert survival[at] == pytest.approx((lengths > EDGES[at]).mean(), abs=0.07)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_curve_learns_new_lengths_after_a_change(before: int, after: int) -> None:
    """Ten half-lives after a change, the mean is that of the new lengths: old ones weigh a thousandth."""
    curve = LengthCurve(half_life=20)
    for length in [before] * 200 + [after] * 200:
        curve.observe(length, stopped=False)
    assert remaining(curve, 0) == pytest.approx(after, rel=0.12, abs=0.01 * before + 1)


def test_request_at_its_limit_counts_as_stopped() -> None:
    """After outputs that were stopped by a limit, a higher limit is expected to be used up, as without any data."""
    lengths = OutputLengths()
    assert lengths.expected(max_tokens=300, prompt_tokens=10) == 300
    for _ in range(MIN_OBSERVATIONS):
        lengths.observe(64, max_tokens=64, prompt_tokens=10, tenant="a")
    assert lengths.expected(max_tokens=1000, prompt_tokens=10, tenant="a") == 1000


def test_most_specific_curve_with_enough_data_is_used() -> None:
    lengths = OutputLengths()
    for _ in range(MIN_OBSERVATIONS):
        lengths.observe(100, max_tokens=1000, prompt_tokens=8000)
    assert lengths.expected(max_tokens=1000, prompt_tokens=10) == pytest.approx(100, rel=0.1)
    for _ in range(MIN_OBSERVATIONS):
        lengths.observe(10, max_tokens=1000, prompt_tokens=10, tenant="a")
    assert lengths.expected(max_tokens=1000, prompt_tokens=10) == pytest.approx(10)
    assert lengths.expected(max_tokens=1000, prompt_tokens=9000) == pytest.approx(100, rel=0.1)
    assert lengths.expected(max_tokens=1000, prompt_tokens=9000, tenant="a") == pytest.approx(10)
    assert lengths.expected(max_tokens=5, prompt_tokens=9000, tenant="a") == pytest.approx(5)
    lengths.validate()


def test_number_of_tenant_curves_is_bounded() -> None:
    """The number of tenants is bounded. A tenant whose requests keep finishing is not evicted."""
    lengths = OutputLengths()
    for number in range(3 * MAX_TENANTS):
        lengths.observe(10, max_tokens=100, prompt_tokens=1, tenant=f"t{number}")
        lengths.observe(50, max_tokens=100, prompt_tokens=1, tenant="faithful")
    lengths.validate()
    assert lengths.curve(prompt_tokens=1, tenant="faithful").num_observed == 3 * MAX_TENANTS


@given(
    st.lists(
        st.tuples(
            st.integers(-5, 2 * MAX_TOKENS),
            st.integers(-5, 2 * MAX_TOKENS),
            st.integers(-5, 10**9),
            st.sampled_from(["", "a", "b"]),
        ),
        max_size=30,
    )
)
def test_any_observations_leave_valid_curves(reports: list[tuple[int, int, int, str]]) -> None:
    lengths = OutputLengths()
    for num_tokens, max_tokens, prompt_tokens, tenant in reports:
        lengths.observe(num_tokens, max_tokens=max_tokens, prompt_tokens=prompt_tokens, tenant=tenant)
        expected = lengths.expected(max_tokens=100, prompt_tokens=prompt_tokens, tenant=tenant)
        assert 1.0 - 1e-9 <= expected <= 100.0
    lengths.validate()


@given(_lengths | st.just([]), _lengths)
def test_survival_with_running_falls_from_one_and_keeps_the_curve(ended: list[int], running: list[int]) -> None:
    curve = curve_of(ended)
    before = curve.mean(10_000)
    found = curve.survival_with_running(np.array(running, dtype=np.int64))
    assert found[0] == 1.0
    assert (np.diff(found) <= 1e-12).all()
    assert (found >= 0.0).all()
    assert curve.mean(10_000) == before
    curve.validate()


@given(st.integers(0, 2**32 - 1))
def test_survival_with_running_equals_final_curve(seed: int) -> None:
    """When a quarter of 1,000 simultaneous requests has ended, the curve is right to 0.05 up to the length reached."""
    random = np.random.default_rng(seed)
    lengths = np.maximum(np.round(random.lognormal(5.0, 1.0, 1000)), 1).astype(int)
    now = int(np.quantile(lengths, 0.25))
    curve = curve_of(lengths[lengths <= now].tolist())
    found = curve.survival_with_running(np.full(int((lengths > now).sum()), now))
    for length in (now // 4, now // 2, now):
        at = int(np.searchsorted(EDGES, length))
        assert found[at] == pytest.approx((lengths > EDGES[at]).mean(), abs=0.05)


def test_survival_beyond_observations_halves_at_four_times_the_length() -> None:
    found = curve_of([]).survival_with_running(np.full(10, 256))
    at = EDGES.tolist().index(256)
    assert found[at] == 1.0
    assert found[EDGES.tolist().index(1024)] == pytest.approx(0.5)
    nobody = np.array([], dtype=np.int64)
    assert (curve_of([]).survival_with_running(nobody) == 1.0).all()
