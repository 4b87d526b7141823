"""Counts with exponential decay by number of observations. Pure; it knows neither the meaning of the bins nor time.

Instead of shrinking all counts at each observation, each new observation weighs more than the one before. That is O(1),
and all counts are scaled back before they become large.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_LARGEST = 1e12  # far below the weight next to which a count of 1 is lost to rounding


class DecayedCounts:
    """Array of counts in which an observation weighs half after `half_life` further observations."""

    __slots__ = ("_growth", "_newest", "_weights", "num_observed")

    def __init__(self, shape: tuple[int, ...], half_life: float) -> None:
        self._weights = np.zeros(shape)
        self._newest = 1.0  # weight of the latest observation
        self._growth = 2.0 ** (1.0 / half_life)
        self.num_observed = 0

    def add(self, *index: int) -> None:
        self._newest *= self._growth
        if self._newest > _LARGEST:
            self._weights /= self._newest
            self._newest = 1.0
        self._weights[index] += self._newest
        self.num_observed += 1

    @property
    def counts(self) -> Floats:
        """Weights relative to the latest observation, which counts 1. Their sum is at most about half_life / log 2."""
        counts: Floats = self._weights / self._newest
        return counts

    @property
    def total(self) -> float:
        return float(self._weights.sum()) / self._newest

    def validate(self) -> None:
        assert (self._weights >= 0.0).all()
        assert self.total <= self.num_observed * (1 + 1e-9)
        assert 0.0 < self._newest <= _LARGEST
