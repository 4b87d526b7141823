"""Fits the formulae of `protocol.profile` to measured points by non-negative least squares of the relative error.

No coefficient is negative, since a negative one predicts negative times somewhere. Workers fit their measurements at
start, and the conductor's cost models fit those of `moonserve profile`. Pure; it knows neither engines nor instances.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from protocol.errors import InvalidRequest

Floats = npt.NDArray[np.float64]

_MOST_COLUMNS = 6  # every subset of the columns is tried


def fit_relative(columns: Floats, seconds: Floats) -> Floats:
    """Returns the c ≥ 0, shape [k], that minimizes Σ (columns · c / seconds − 1)².

    `columns` has shape [points, k], `seconds` [points]. The minimum over c ≥ 0 is the unconstrained minimum over the
    columns with nonzero coefficients (Lawson & Hanson 1974, ch. 23), so all subsets of the few columns are tried.
    Raises InvalidRequest for no points, too many columns, infinite or NaN values, and times that are not above zero."""
    columns, seconds = np.asarray(columns, float), np.asarray(seconds, float)
    _check(columns, seconds)
    rows = columns / seconds[:, None]
    # Columns such as n² and 1 differ widely. Scaled to equal norms, no singular value is small enough to count as zero.
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
