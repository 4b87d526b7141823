"""The Mann-Whitney test of two samples for a common distribution (Ann. Math. Statist. 18, 1947)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def mann_whitney_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the two-sided p by the normal approximation, corrected for ties and continuity; for 20 or more values."""
    n, m = len(a), len(b)
    if not n or not m:
        raise ValueError("both samples need values")
    ranks = _ranks([*a, *b])
    u = sum(ranks[:n]) - n * (n + 1) / 2
    total = n + m
    ties = sum(count**3 - count for count in Counter([*a, *b]).values())
    variance = n * m / 12 * ((total + 1) - ties / (total * (total - 1)))
    if variance <= 0:
        return 1.0  # all values are equal
    z = max(0.0, abs(u - n * m / 2) - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))


def _ranks(values: Sequence[float]) -> list[float]:
    """Returns ranks from 1; equal values get the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for place in order[first : last + 1]:
            ranks[place] = (first + last) / 2 + 1
        first = last + 1
    return ranks
