"""How many sequences are placed after a decision and land before it does, by how far ahead it looks. Pure.

What a decision knows of the future only ends; in truth new requests with shorter prompts overtake. Without them far
looks see idle machines, and admission would prefer the longest prompts. Per doubling of the lead one running mean of
what came over what was known, and one of how far single cases lie from it; knows no instances.
"""

from __future__ import annotations

import math

SHORTEST_S = 0.125
_NUM_BINS = 10  # to a minute and more
_WEIGHT = 0.02  # of the newest: about the last 50


class Overtaking:
    """Means and variances over all decode instances."""

    def __init__(self) -> None:
        self._means = [0.0] * _NUM_BINS
        self._variances = [0.0] * _NUM_BINS
        self._counts = [0] * _NUM_BINS

    def observe(self, lead_s: float, surplus: float) -> None:
        """So long ago `surplus` fewer sequences than there are now were foreseen at this instant."""
        at = _bin_of(lead_s)
        self._counts[at] += 1
        weight = max(_WEIGHT, 1.0 / self._counts[at])
        off = surplus - self._means[at]
        self._means[at] += weight * off
        # Welford's update with a constant weight: off times what is left of it, which is never below 0.
        self._variances[at] += weight * ((1.0 - weight) * off * off - self._variances[at])

    def expected(self, lead_s: float, deviations: float = 0.0) -> float:
        """Sequences, at least 0; so many standard deviations more than their mean."""
        at = _bin_of(lead_s)
        return max(self._means[at] + deviations * math.sqrt(self._variances[at]), 0.0)

    def validate(self) -> None:
        assert all(math.isfinite(mean) for mean in self._means)
        assert all(0.0 <= variance < math.inf for variance in self._variances)


def _bin_of(lead_s: float) -> int:
    if lead_s <= SHORTEST_S:
        return 0
    return min(int(math.log2(lead_s / SHORTEST_S)) + 1, _NUM_BINS - 1)
