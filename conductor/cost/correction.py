"""By how much an instance is slower or faster now than its formula says: one factor, learned from what it reports.

The factor f is the exponential of a running estimate of log(actual / predicted):

    x ← x + w · clip(log(actual / predicted) − x, ±C),   f = exp(x),   |x| ≤ log MOST

The logarithm makes twice as slow and twice as fast equally far, and its middle is what a relative error wants. The
clipped step makes it Huber's estimate of the middle: one report, however wild, moves f by at most exp(w·C) = 6 %.

How fast: at a distance d beyond C the estimate moves w·C per report, within C the distance shrinks by (1−w). So after
a machine has become 2× slower, f is within 5 % after 15 reports, at 4× after 27. How steady:
under independent noise of log-deviation σ ≤ C it stays within a deviation of σ·√(w/(2−w)) = σ/3. Pure; knows neither
formula nor instance.
"""

from __future__ import annotations

import math

# A window of about (2−w)/w = 9 reports: a busy neighbour is seen within seconds, and noise is a third of a report's.
WEIGHT = 0.2
CLIP = 0.3  # a report that is 35 % off is still believed in full
MOST = 8.0  # what is further off than this is a broken clock or formula, not a slow machine


class Correction:
    """One instance's factor; 1 until something was reported."""

    __slots__ = ("_log", "factor")

    def __init__(self) -> None:
        self._log = 0.0
        self.factor = 1.0  # actual ÷ predicted by the formula alone

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """`predicted_s` is the formula's, without this factor. Times that are not above zero say nothing."""
        if not (0.0 < predicted_s < math.inf and 0.0 < actual_s < math.inf):
            return
        bound = math.log(MOST)
        step = math.log(actual_s) - math.log(predicted_s) - self._log
        self._log += WEIGHT * min(max(step, -CLIP), CLIP)
        self._log = min(max(self._log, -bound), bound)
        self.factor = math.exp(self._log)

    def fade(self, share: float) -> None:
        """So much of what the factor is off from 1 is believed from now on, 0 to 1."""
        self._log *= share
        self.factor = math.exp(self._log)

    def validate(self) -> None:
        assert self.factor * (1 + 1e-12) >= 1.0 / MOST
        assert self.factor <= MOST * (1 + 1e-12)
        assert math.isclose(self.factor, math.exp(self._log))
