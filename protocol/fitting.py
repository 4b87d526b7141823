"""Fitting the formulae of `protocol.profile` to measured points: non-negative least squares of the relative error.

Its rule: no coefficient below zero, since one would predict negative times somewhere. Workers fit what they measure at
start with it, the conductor's cost models what `moonserve profile` measures. Pure; knows neither engines nor instances.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from protocol.errors import InvalidRequest

Floats = npt.NDArray[np.float64]

_MOST_COLUMNS = 6  # every set of them is tried


def fit_relative(columns: Floats, seconds: Floats) -> Floats:
    """The c ≥ 0, shape [k], that makes Σ (columns · c / seconds − 1)² least.

    `columns` has shape [points, k], `seconds` [points]. The minimum over c ≥ 0 is the unconstrained minimum over the
    columns that are not zero in it (Lawson & Hanson 1974, ch. 23), and few columns have few sets. Raises InvalidRequest
    when there is no point, or one without a time above zero."""
    columns, seconds = np.asarray(columns, float), np.asarray(seconds, float)
    _check(columns, seconds)
    rows = columns / seconds[:, None]
    # n² beside 1: columns of one size keep small singular values from being taken for zero.
    sizes = np.linalg.norm(rows, axis=0)
    sizes[sizes == 0.0] = 1.0
    coefficients: Floats = _least(rows / sizes) / sizes
    return coefficients


def _least(rows: Floats) -> Floats:
    num_points, num_columns = rows.shape
    best, best_error = np.zeros(num_columns), float(num_points)
    for count in range(1, num_columns + 1):
        for active in map(list, itertools.combinations(range(num_columns), count)):
            solution = np.linalg.lstsq(rows[:, active], np.ones(num_points), rcond=None)[0]
            error = float(np.sum((rows[:, active] @ solution - 1.0) ** 2))
            if (solution >= 0.0).all() and error < best_error:
                best, best_error = np.zeros(num_columns), error
                best[active] = solution
    return best


def _check(columns: Floats, seconds: Floats) -> None:
    if columns.ndim != 2 or columns.shape[0] != seconds.size or not seconds.size:
        raise InvalidRequest(f"{columns.shape} columns do not fit {seconds.size} measured times")
    if columns.shape[1] > _MOST_COLUMNS:
        raise InvalidRequest(f"at most {_MOST_COLUMNS} coefficients, not {columns.shape[1]}")
    if not (np.isfinite(columns).all() and np.isfinite(seconds).all() and (seconds > 0).all()):
        raise InvalidRequest("measured times must be finite and above zero")
