"""When synthetic requests come: constant, Poisson or gamma gaps, under a rate that may rise and fall over the day.

Gaps are drawn with mean 1 and stretched by the inverse of the accumulated rate, so burstiness and profile do not
depend on each other: the profile sets how many come per hour, the gaps how unevenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from protocol.errors import ConfigError

PROCESSES = ("constant", "poisson", "gamma")
_STEPS = 60  # of bisection: enough for the last bit of a double


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalSpec:
    """rate(t) = rate · (1 − amplitude · cos(2π t / period)): the trace begins at the quietest moment."""

    rate: float  # requests per second, mean over a period
    process: str = "poisson"
    burstiness: float = 1.0  # deviation / mean of the gaps; only for gamma
    diurnal_amplitude: float = 0.0  # 0: constant; 1: the quietest moment has none
    diurnal_period_s: float = 86_400.0

    def check(self) -> None:
        """Raises ConfigError that says what to change."""
        if not 0 < self.rate < math.inf:
            raise ConfigError("--rate must be above 0 requests per second")
        if self.process not in PROCESSES:
            raise ConfigError(f"--arrivals is one of {', '.join(PROCESSES)}, not {self.process!r}")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError("--burstiness must be above 0; 1 is Poisson")
        if not 0 <= self.diurnal_amplitude <= 1:
            raise ConfigError("--diurnal-amplitude is from 0 to 1")
        if not 0 < self.diurnal_period_s < math.inf:
            raise ConfigError("--diurnal-period-s must be above 0")

    def expected(self, until_s: float) -> float:
        """The number of requests expected before `until_s`."""
        angular = 2 * math.pi / self.diurnal_period_s
        swing = self.diurnal_amplitude * math.sin(angular * until_s) / angular
        return self.rate * (until_s - swing)


def arrival_times(spec: ArrivalSpec, random: Random) -> Iterator[float]:
    """Instants in seconds from 0 on, without end and never falling. The first gap comes before the first request."""
    expected = 0.0
    at_s = 0.0
    while True:
        expected += _unit_gap(spec, random)
        at_s = _instant(spec, expected, not_before_s=at_s)
        yield at_s


def _unit_gap(spec: ArrivalSpec, random: Random) -> float:
    if spec.process == "constant":
        return 1.0
    if spec.process == "poisson":
        return random.expovariate(1.0)
    shape = spec.burstiness**-2
    return random.gammavariate(shape, 1 / shape)


def _instant(spec: ArrivalSpec, expected: float, *, not_before_s: float) -> float:
    """The inverse of `spec.expected`."""
    even_s = expected / spec.rate
    if not spec.diurnal_amplitude:
        return even_s
    # Accumulated, the swing is never more than this away from an even rate.
    swing_s = spec.diurnal_amplitude * spec.diurnal_period_s / (2 * math.pi)
    low, high = max(not_before_s, even_s - swing_s), even_s + swing_s
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if spec.expected(middle) < expected:
            low = middle
        else:
            high = middle
    return high
