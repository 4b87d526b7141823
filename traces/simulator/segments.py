"""Runs of steps whose durations are an arithmetic series, and the token gaps that follow from them. Pure arithmetic.

While the members of a batch stay the same, every sequence grows by one token per step and the step time by a constant,
so m steps need no m events. A request's gaps are read from its segments. Works on any numbers that can be added and
divided (tests use fractions, which do not round).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """`num_steps` steps. The first takes `first_s`, each later one `growth_s` more than the one before."""

    num_steps: int
    first_s: float
    growth_s: float
    num_others: int = 0  # other machines that compute on the host

    def elapsed_s(self, num_steps: int) -> float:
        """Returns the seconds of the first `num_steps` steps."""
        return num_steps * self.first_s + self.growth_s * (num_steps * (num_steps - 1) // 2)

    @property
    def total_s(self) -> float:
        return self.elapsed_s(self.num_steps)

    def steps_within(self, seconds: float) -> int:
        """Returns the number of whole steps that end within `seconds`, at most `num_steps`."""
        if seconds >= self.total_s:
            return self.num_steps
        steps = min(max(self._solve(float(seconds)), 0), self.num_steps)
        while steps > 0 and self.elapsed_s(steps) > seconds:
            steps -= 1
        while steps < self.num_steps and self.elapsed_s(steps + 1) <= seconds:
            steps += 1
        return steps

    def _solve(self, seconds: float) -> int:
        """Estimates `steps_within`: the root of growth/2·m² + (first − growth/2)·m = seconds."""
        first, growth = float(self.first_s), float(self.growth_s)
        linear = first - growth / 2
        if growth <= 0.0:
            return int(seconds / first) if first > 0.0 else self.num_steps
        return int((math.sqrt(linear * linear + 2 * growth * seconds) - linear) / growth)

    def gaps_s(self) -> list[float]:
        """Returns the duration of each step."""
        first, growth = self.first_s, self.growth_s
        return [first + growth * step for step in range(self.num_steps)]


class Run(NamedTuple):
    """Segments [begin, end) of a machine, in which a sequence gets a token from every step."""

    waited_s: float  # between its latest token and the first of these steps
    begin: int
    end: int


# Gap ÷ step time by the number of others; the last entry applies to more. Values have equal shares, shortest first.
Spread = Sequence[Sequence[float]]

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples fill the unit interval evenly, for any number of them


def gaps_of(runs: Sequence[Run], segments: Sequence[Segment], spread: Spread = ()) -> list[float]:
    """Returns the times between a request's tokens, in order. With `spread`, tokens come as clients see them: sometimes
    several at once, sometimes after a pause. The arrival of the last token does not change."""
    gaps: list[float] = []
    waits: list[tuple[int, float]] = []
    for waited_s, begin, end in runs:
        first = len(gaps)
        for segment in segments[begin:end]:
            gaps += segment.gaps_s()
        if first < len(gaps):  # else its first step is still in flight
            waits.append((first, waited_s))
    if spread:
        others = [s.num_others for _, b, e in runs for s in segments[b:e] for _ in range(s.num_steps)]
        gaps = _spread(gaps, others, spread)
    for first, waited_s in waits:
        gaps[first] += waited_s
    return gaps


def _spread(gaps: Sequence[float], others: Sequence[int], spread: Spread) -> list[float]:
    """Spreads gaps in an order that depends only on the token's number: equal simulations have equal results."""
    spread_out: list[float] = []
    for number, (gap, num_others) in enumerate(zip(gaps, others, strict=True)):
        shares = spread[min(num_others, len(spread) - 1)]
        place = int((number * _GOLDEN + 0.5) % 1.0 * len(shares))
        spread_out.append(gap * shares[place])
    total = sum(spread_out)
    if not total:
        return list(gaps)
    stretch = sum(gaps) / total
    return [gap * stretch for gap in spread_out]
