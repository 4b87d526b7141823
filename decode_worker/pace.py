"""How many times as long this worker's steps take as its profiles say, lately. Pure.

Profiles are measured at the start, when nobody else computes on the host. A budget of time that is kept by them alone
is broken where processes share cores. The factor follows the logarithm of actual ÷ predicted, bounded per step, so that
one stall moves it little; it is never below 1, since steps that are shorter than predicted promise nothing.
"""

from __future__ import annotations

import math

# A dozen steps that agree move it two thirds of the way. Steps are tenths of a second, changes of load seconds.
WEIGHT = 0.1
MOST_LOG = math.log(4.0)


class Pace:
    """Of one worker."""

    __slots__ = ("_log",)

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        """At least 1."""
        return math.exp(max(self._log, 0.0))

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """A step took `actual_s`. Impossible figures are ignored."""
        if not (0.0 < predicted_s < math.inf and 0.0 <= actual_s < math.inf):
            return
        found = math.log(max(actual_s / predicted_s, 1e-3))
        self._log += WEIGHT * min(max(found - self._log, -MOST_LOG), MOST_LOG)
        self._log = max(self._log, -MOST_LOG)
