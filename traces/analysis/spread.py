"""Mean and percentiles of a sample, under the names that every part of the analysis uses."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99)


def spread(values: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> dict[str, float | None]:
    """`mean`, `min`, `p1` … `p99`, `max`; each null for an empty sample. `weights`: how often each value counts."""
    sample = np.asarray(values, dtype=np.float64)
    if weights is not None:
        sample = np.repeat(sample, np.asarray(weights, dtype=np.int64))
    names = ("mean", "min", *(f"p{percent}" for percent in PERCENTS), "max")
    if not sample.size:
        return dict.fromkeys(names)
    figures: list[Any] = [
        sample.mean(),
        sample.min(),
        *np.percentile(sample, PERCENTS),
        sample.max(),
    ]
    return dict(zip(names, map(float, figures), strict=True))
