"""How far a fitted formula is from what was measured. Pure; knows no formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_NUM_WORST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One measured point."""

    at: tuple[int, int]  # the formula's two arguments
    measured_s: float
    predicted_s: float

    @property
    def relative(self) -> float:
        """Predicted minus measured, as a share of the measured."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """|predicted − measured| / measured over all points."""

    num_points: int
    p50: float
    p90: float
    max: float
    worst: tuple[Residual, ...]  # the largest error first


def report_errors(
    at: Sequence[tuple[int, int]], measured_s: Floats, predicted_s: Floats
) -> ErrorReport:
    """`measured_s` and `predicted_s` have shape [points], measured ones above zero."""
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
