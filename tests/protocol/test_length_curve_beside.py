"""Output lengths while many still run: those count as well, so that the first to end do not make all seem short."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.length_curve import EDGES, LengthCurve

_lengths = st.lists(st.integers(1, 5000), max_size=60)


def curve_of(lengths: list[int]) -> LengthCurve:
    curve = LengthCurve(1e9)
    for length in lengths:
        curve.observe(length, stopped=False)
    return curve


@given(_lengths, _lengths)
def test_it_falls_from_one_and_leaves_the_curve_alone(ended: list[int], running: list[int]) -> None:
    curve = curve_of(ended)
    before = curve.mean(10_000)
    found = curve.survival_beside(np.array(running, dtype=np.int64))
    assert found[0] == 1.0
    assert (np.diff(found) <= 1e-12).all()
    assert (found >= 0.0).all()
    assert curve.mean(10_000) == before
    curve.validate()


@given(st.integers(0, 2**32 - 1))
def test_it_is_the_curve_of_all_once_the_others_have_ended(seed: int) -> None:
    """1,000 begin at once; when a quarter has ended the curve is right as far as anybody came, and to within a bin."""
    random = np.random.default_rng(seed)
    lengths = np.maximum(np.round(random.lognormal(5.0, 1.0, 1000)), 1).astype(int)
    now = int(np.quantile(lengths, 0.25))
    curve = curve_of(lengths[lengths <= now].tolist())
    found = curve.survival_beside(np.full(int((lengths > now).sum()), now))
    for length in (now // 4, now // 2, now):
        at = int(np.searchsorted(EDGES, length))
        assert found[at] == pytest.approx((lengths > EDGES[at]).mean(), abs=0.05)


def test_beyond_all_that_was_seen_it_is_four_times_as_long_with_even_odds() -> None:
    found = curve_of([]).survival_beside(np.full(10, 256))
    at = EDGES.tolist().index(256)
    assert found[at] == 1.0
    assert found[EDGES.tolist().index(1024)] == pytest.approx(0.5)


def test_without_anybody_nobody_is_known_to_end() -> None:
    assert (curve_of([]).survival_beside(np.array([], dtype=np.int64)) == 1.0).all()
