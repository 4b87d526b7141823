"""Fits a linear formula to measured times and reports its errors. Pure; knows no particular formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from conductor.columns import Floats, Ints
from protocol.fitting import fit_relative
from protocol.profile import DecodeProfile, PrefillProfile

P = TypeVar("P", PrefillProfile, DecodeProfile)

_NUM_WORST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One measured point with its prediction."""

    at: tuple[int, int]  # the formula's two arguments
    measured_s: float
    predicted_s: float

    @property
    def relative(self) -> float:
        """(predicted − measured) ÷ measured."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """Quantiles of |predicted − measured| ÷ measured over all points."""

    num_points: int
    p50: float
    p90: float
    max: float
    worst: tuple[Residual, ...]  # the largest error first


def report_errors(at: Sequence[tuple[int, int]], measured_s: Floats, predicted_s: Floats) -> ErrorReport:
    """Returns the errors of predictions. Both times have shape [points]; measured times are above zero."""
    errors = np.abs(predicted_s / measured_s - 1.0)
    worst = np.argsort(-errors, kind="stable")[:_NUM_WORST]
    return ErrorReport(
        num_points=len(errors),
        p50=float(np.quantile(errors, 0.5)),
        p90=float(np.quantile(errors, 0.9)),
        max=float(errors.max()),
        worst=tuple(
            Residual(at=at[i], measured_s=float(measured_s[i]), predicted_s=float(predicted_s[i]))
            for i in map(int, worst)
        ),
    )


# No slots: a frozen dataclass with slots cannot be instantiated as `Fit[…]`.
@dataclass(frozen=True, kw_only=True)
class Fit(Generic[P]):
    profile: P
    errors: ErrorReport  # of the points it was fitted to


def fit(
    kind: type[P],
    at: tuple[Ints, Ints],
    columns: Sequence[Floats | Ints],
    seconds: Floats,
) -> Fit[P]:
    """Fits c0 · columns[0] + c1 · columns[1] + c2 · columns[2] to `seconds`; all arrays have shape [points]. `at`: the
    formula's arguments at each point, for the error report."""
    matrix, seconds = np.stack(columns, axis=-1).astype(float), np.asarray(seconds, float)
    coefficients = fit_relative(matrix, seconds)
    c0, c1, c2 = map(float, coefficients)
    points = list(zip(at[0].tolist(), at[1].tolist(), strict=True))
    errors = report_errors(points, seconds, matrix @ coefficients)
    return Fit(profile=kind(c0=c0, c1=c1, c2=c2), errors=errors)
