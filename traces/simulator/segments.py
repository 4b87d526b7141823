"""Runs of steps whose times are an arithmetic series, and the token gaps that follow from them. Pure arithmetic.

While nobody joins or leaves a batch, every sequence grows by one token per step and the step time by a constant, so
that m steps need no m events. A request's gaps are read off the segments that it lived through. Works on any numbers
that can be added and divided (tests use fractions, which do not round).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """`num_steps` steps; the first takes `first_s`, each further one `growth_s` more than the one before."""

    num_steps: int
    first_s: float
    growth_s: float
    num_others: int = 0  # machines that compute beside it on its host

    def elapsed_s(self, num_steps: int) -> float:
        """Seconds that its first `num_steps` steps take."""
        return num_steps * self.first_s + self.growth_s * (num_steps * (num_steps - 1) // 2)

    @property
    def total_s(self) -> float:
        return self.elapsed_s(self.num_steps)

    def steps_within(self, seconds: float) -> int:
        """How many whole steps end within `seconds`, at most `num_steps`."""
        if seconds >= self.total_s:
            return self.num_steps
        steps = min(max(self._solve(float(seconds)), 0), self.num_steps)
        while steps > 0 and self.elapsed_s(steps) > seconds:
            steps -= 1
        while steps < self.num_steps and self.elapsed_s(steps + 1) <= seconds:
            steps += 1
        return steps

    def _solve(self, seconds: float) -> int:
        """About `steps_within`: the root of growth/2·m² + (first − growth/2)·m = seconds."""
        first, growth = float(self.first_s), float(self.growth_s)
        linear = first - growth / 2
        if growth <= 0.0:
            return int(seconds / first) if first > 0.0 else self.num_steps
        return int((math.sqrt(linear * linear + 2 * growth * seconds) - linear) / growth)

    def gaps_s(self) -> list[float]:
        """The time of each step."""
        first, growth = self.first_s, self.growth_s
        return [first + growth * step for step in range(self.num_steps)]


class Run(NamedTuple):
    """A stretch in which a sequence got a token from every step: segments [begin, end) of its machine."""

    waited_s: float  # between its latest token and the first of these steps
    begin: int
    end: int


# Gap ÷ step time in equal shares, shortest first, by the number of others; the last ones also for more.
Spread = Sequence[Sequence[float]]

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples fill the unit interval evenly, however many they are


def gaps_of(runs: Sequence[Run], segments: Sequence[Segment], spread: Spread = ()) -> list[float]:
    """The times between a request's tokens, in order. With a `spread` tokens come as clients see them: now several at
    once, now after a pause; the last one comes when it does without."""
    gaps: list[float] = []
    waits: list[tuple[int, float]] = []
    for waited_s, begin, end in runs:
        first = len(gaps)
        for segment in segments[begin:end]:
            gaps += segment.gaps_s()
        if first < len(gaps):  # else its first step is not done yet
            waits.append((first, waited_s))
    if spread:
        others = [s.num_others for _, b, e in runs for s in segments[b:e] for _ in range(s.num_steps)]
        gaps = _spread(gaps, others, spread)
    for first, waited_s in waits:
        gaps[first] += waited_s
    return gaps


def _spread(gaps: Sequence[float], others: Sequence[int], spread: Spread) -> list[float]:
    """In an order that depends on nothing but the token's number, so that equal simulations have equal results."""
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
