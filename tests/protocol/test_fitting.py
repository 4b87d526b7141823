"""Non-negative least squares of the relative error: the best among all that are allowed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidRequest
from protocol.fitting import fit_relative


def _columns(pairs: list[tuple[float, float]]) -> np.ndarray:
    return np.array([(1.0, x1, x2) for x1, x2 in pairs])


def test_a_fit_finds_the_coefficients_that_made_the_points() -> None:
    """Also where the columns differ by eight orders of magnitude."""
    columns = _columns([(16, 256), (64, 4096), (512, 262144), (256, 196608), (8192, 67108864)])
    truth = np.array([0.002, 3e-5, 4e-8])
    assert fit_relative(columns, columns @ truth) == pytest.approx(truth, rel=1e-6)


def test_a_fit_is_never_negative() -> None:
    columns = _columns([(1, 10), (2, 20), (4, 80), (8, 60)])
    found = fit_relative(columns, np.array([0.5, 0.4, 0.3, 0.2]))
    assert found.min() >= 0
    assert found.max() > 0


def test_a_column_of_zeros_gets_a_coefficient_of_zero() -> None:
    found = fit_relative(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([2.0, 2.0]))
    assert found == pytest.approx([2.0, 0.0])


@given(
    st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e8), st.floats(1e-4, 1e2)), min_size=3, max_size=12),
    st.tuples(*[st.floats(-0.3, 0.3)] * 3),
)
def test_no_allowed_change_of_the_result_is_better(
    points: list[tuple[float, float, float]], change: tuple[float, float, float]
) -> None:
    """The problem is convex: a minimum among its neighbours is the minimum."""
    columns = _columns([(x1, x2) for x1, x2, _ in points])
    seconds = np.array([s for _, _, s in points])
    found = fit_relative(columns, seconds)
    sizes = np.linalg.norm(columns / seconds[:, None], axis=0)
    other = np.maximum(found + np.array(change) / sizes, 0.0)

    def error(c: np.ndarray) -> float:
        return float(np.sum((columns @ c / seconds - 1) ** 2))

    assert error(found) <= error(other) + 1e-7 * len(points)


@pytest.mark.parametrize("seconds", [[], [0.0], [-1.0], [float("nan")], [1.0, 2.0]])
def test_points_without_a_time_are_refused(seconds: list[float]) -> None:
    with pytest.raises(InvalidRequest):
        fit_relative(np.ones((1, 3)), np.array(seconds))
