"""Tests of cost profiles: fits to measurements, when prompts share a step, and how large a chunk fits into it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.step_time import MIN_CHUNK_TOKENS, DecodeProfile, PrefillProfile, StepBudget, fit_relative
from tests.thoroughness import examples


def _columns(pairs: list[tuple[float, float]]) -> np.ndarray:
    return np.array([(1.0, x1, x2) for x1, x2 in pairs])


def test_fit_recovers_the_coefficients_of_the_points() -> None:
    """A fit finds the true coefficients, also if the columns differ by eight orders of magnitude."""
    columns = _columns([(16, 256), (64, 4096), (512, 262144), (256, 196608), (8192, 67108864)])
    truth = np.array([0.002, 3e-5, 4e-8])
    assert fit_relative(columns, columns @ truth) == pytest.approx(truth, rel=1e-6)


def test_column_of_zeros_gets_a_coefficient_of_zero() -> None:
    found = fit_relative(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([2.0, 2.0]))
    assert found == pytest.approx([2.0, 0.0])


@given(
    st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e8), st.floats(1e-4, 1e2)), min_size=3, max_size=12),
    st.tuples(*[st.floats(-0.3, 0.3)] * 3),
)
def test_no_feasible_change_improves_the_fit(
    points: list[tuple[float, float, float]], change: tuple[float, float, float]
) -> None:
    """No other non-negative coefficients nearby have a smaller error. A local minimum of a convex problem is global."""
    columns = _columns([(x1, x2) for x1, x2, _ in points])
    seconds = np.array([s for _, _, s in points])
    found = fit_relative(columns, seconds)
    sizes = np.linalg.norm(columns / seconds[:, None], axis=0)
    other = np.maximum(found + np.array(change) / sizes, 0.0)

    def error(c: np.ndarray) -> float:
        return float(np.sum((columns @ c / seconds - 1) ** 2))

    assert (found >= 0.0).all()
    assert error(found) <= error(other) + 1e-7 * len(points)


@pytest.mark.parametrize("seconds", [[], [0.0], [-1.0], [float("nan")], [1.0, 2.0]])
def test_points_without_a_valid_time_are_refused(seconds: list[float]) -> None:
    with pytest.raises(InvalidRequest):
        fit_relative(np.ones((1, 3)), np.array(seconds))


@given(
    c0=st.floats(0, 0.1),
    c1=st.floats(1e-6, 1e-2),
    num_tokens=st.integers(1, 512),
    num_delayed=st.integers(1, 20),
    num_behind=st.integers(0, 40),
)
def test_prompt_joins_a_step_if_total_waiting_falls(
    c0: float, c1: float, num_tokens: int, num_delayed: int, num_behind: int
) -> None:
    """A prompt that joins a step delays the prompts that end with it. It and all behind it save a constant."""
    profile = PrefillProfile(c0=c0, c1=c1, c2=0.0)
    own_s = c1 * num_tokens
    joined_s = (num_delayed + 1 + num_behind) * own_s
    apart_s = (1 + num_behind) * (c0 + own_s)
    joins = profile.is_worth_joining(num_tokens, 0, num_delayed=num_delayed, num_waiting=1 + num_behind)
    if abs(joined_s - apart_s) > 1e-12:
        assert joins == (joined_s < apart_s)


DECODE = DecodeProfile(c0=0.0256, c1=1.1e-4, c2=4.07e-8)
A800 = PrefillProfile(c0=0.0, c1=1.15e-4, c2=7.3e-10)


@pytest.mark.parametrize("max_step_s", [0.0, -1.0, math.inf, math.nan])
def test_budget_must_be_a_finite_positive_time(max_step_s: float) -> None:
    with pytest.raises(InvalidRequest):
        StepBudget(decode=DECODE, prefill=A800, max_step_s=max_step_s)


@settings(max_examples=examples(200))
@given(
    c0=st.sampled_from([0.0, 0.005]),
    c1=st.sampled_from([0.0, 1e-4, 1e-3]),
    c2=st.sampled_from([0.0, 1e-9, 1e-7]),
    spent_s=st.floats(0.0, 0.5),
    num_done=st.integers(0, 100_000),
    most=st.integers(1, 10_000),
)
def test_chunk_is_the_largest_within_the_budget(
    c0: float, c1: float, c2: float, spent_s: float, num_done: int, most: int
) -> None:
    """One more token would exceed the budget or does not exist. If even the least chunk exceeds it, it is returned."""
    budget = StepBudget(decode=DECODE, prefill=PrefillProfile(c0=c0, c1=c1, c2=c2), max_step_s=0.3)
    chunk = budget.chunk_tokens(spent_s, num_done, most)

    def step_s(num_tokens: int) -> float:
        return spent_s + budget.prefill.seconds(num_done + num_tokens, num_done)

    assert min(MIN_CHUNK_TOKENS, most) <= chunk <= most
    if chunk > MIN_CHUNK_TOKENS:
        assert step_s(chunk) <= 0.3 + 1e-9
    if chunk < most:
        assert step_s(chunk + 1) > 0.3 - 1e-9


@settings(max_examples=examples(100))
@given(
    num_seqs=st.integers(0, 64),
    context=st.integers(0, 1_000_000),
    prompts=st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 5_000)), max_size=5),
    most=st.integers(0, 8_192),
)
def test_several_prompts_share_the_budget(
    num_seqs: int, context: int, prompts: list[tuple[int, int]], most: int
) -> None:
    """A prompt follows only if the one before completes. Only the first may exceed the budget, by the least chunk."""
    budget = StepBudget(decode=DECODE, prefill=A800, max_step_s=0.1)
    chunks = budget.chunks(num_seqs, context, prompts, most)
    assert sum(chunks) <= most
    assert bool(chunks) == bool(prompts and most)
    parts = list(zip(prompts, chunks, strict=False))
    assert all(chunk == missing for (_, missing), chunk in parts[:-1])
    decode_s = DECODE.step_s(num_seqs, context) if num_seqs else 0.0
    step_s = decode_s + sum(A800.seconds(done + n, done) for (done, _), n in parts)
    if parts:
        done = parts[0][0][0]
        least_s = A800.seconds(done + MIN_CHUNK_TOKENS, done)
        assert step_s <= max(0.1, decode_s + least_s) + 1e-9
