"""Description of a workload: arrivals, lengths, shares. Frozen data, checked once.

Gaps between requests are drawn with mean 1 and stretched by the inverse of the accumulated rate. So burstiness and
profile are independent: the profile sets the number of requests per hour, the gaps their unevenness.

A *thread* is the activity of one user: a session of turns that each extend the last prompt, questions about one
document, or a single request. Each may begin with one of a few system prompts, whose popularity follows Zipf's law.
Shares are of newly begun threads, from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from protocol.errors import ConfigError

PROCESSES = ("constant", "poisson", "gamma")
_STEPS = 60  # of bisection; enough for the last bit of a double


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalSpec:
    """rate(t) = rate · (1 − amplitude · cos(2π t / period)): the trace begins at the quietest time."""

    rate: float  # requests per second, mean over a period
    process: str = "poisson"
    burstiness: float = 1.0  # standard deviation / mean of the gaps; only for gamma
    diurnal_amplitude: float = 0.0  # 0 = constant; 1 = no requests at the quietest time
    diurnal_period_s: float = 86_400.0

    def check(self) -> None:
        """Raises ConfigError with the options to change."""
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
        """Returns the expected number of requests before `until_s`."""
        angular = 2 * math.pi / self.diurnal_period_s
        swing = self.diurnal_amplitude * math.sin(angular * until_s) / angular
        return self.rate * (until_s - swing)


def arrival_times(spec: ArrivalSpec, random: Random) -> Iterator[float]:
    """Yields endless arrival times in seconds from 0, never decreasing. The first gap precedes the first request."""
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
    """Returns the inverse of `spec.expected`."""
    even_s = expected / spec.rate
    if not spec.diurnal_amplitude:
        return even_s
    # The accumulated swing never deviates by more than this from an even rate.
    swing_s = spec.diurnal_amplitude * spec.diurnal_period_s / (2 * math.pi)
    low, high = max(not_before_s, even_s - swing_s), even_s + swing_s
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if spec.expected(middle) < expected:
            low = middle
        else:
            high = middle
    return high


class Draws(Protocol):
    """A distribution of non-negative numbers."""

    def draw(self, random: Random) -> float:
        """Draws one number."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same number."""

    value: float

    def draw(self, random: Random) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lognormal with this mean. `sigma`: deviation of the logarithm (1: the 90th percentile is 2.2 × the mean)."""

    mean: float
    sigma: float

    def draw(self, random: Random) -> float:
        return random.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)


@dataclass(frozen=True, slots=True)
class Empirical:
    """One of the values, with equal probability."""

    values: tuple[float, ...]

    def draw(self, random: Random) -> float:
        return random.choice(self.values)


def draw_tokens(draws: Draws, random: Random) -> int:
    """Draws a number of tokens, at least 1."""
    return max(1, round(draws.draw(random)))


def parse_draws(text: str, flag: str) -> Draws:
    """Parses a distribution. Raises ConfigError that names the flag and the syntax."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "lognormal":
            mean, sigma = map(float, rest.split(":"))
            return LogNormal(_above_0(mean), _not_below_0(sigma))
        if kind == "empirical":
            return Empirical(_values(Path(rest)))
        return Constant(_not_below_0(float(text)))
    except ValueError as error:
        raise ConfigError(
            f"{flag}: {text!r} is no distribution ({error}); write a number, "
            "lognormal:MEAN:SIGMA or empirical:FILE with a number on each line"
        ) from error


def _values(path: Path) -> tuple[float, ...]:
    try:
        lines = path.read_text().split()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if not lines:
        raise ValueError(f"{path} is empty")
    return tuple(_not_below_0(float(line)) for line in lines)


def _above_0(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{value} is not above 0")
    return value


def _not_below_0(value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{value} is not 0 or more")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A workload. The defaults are a chat with a few system prompts."""

    arrivals: ArrivalSpec = ArrivalSpec(rate=1.0)  # frozen, like the results of all calls below
    num_requests: int = 10_000
    input_tokens: Draws = LogNormal(2_000, 1.0)
    output_tokens: Draws = LogNormal(300, 0.8)
    max_input_tokens: int = 128_000
    # System prompts: all threads with the same one share its whole blocks.
    system_share: float = 1.0
    system_prompts: int = 10
    system_zipf: float = 1.0
    system_tokens: Draws = Constant(1_024)
    # Sessions: a turn consists of the last prompt, its answer and new tokens.
    session_share: float = 0.5
    turns: float = 3.0  # mean, at least 1; geometric
    turn_tokens: Draws = LogNormal(300, 1.0)
    think_s: Draws = LogNormal(90, 1.0)  # from arrival to arrival
    # Documents: a question consists of the document and new tokens.
    document_share: float = 0.0
    questions: float = 4.0  # mean, at least 1; geometric
    document_tokens: Draws = LogNormal(15_000, 0.8)
    question_tokens: Draws = LogNormal(200, 0.8)

    def check(self) -> None:
        """Raises ConfigError with the options to change."""
        self.arrivals.check()
        for name in ("system_share", "session_share", "document_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"--{name.replace('_', '-')} is a share from 0 to 1")
        if self.session_share + self.document_share > 1:
            raise ConfigError("--session-share and --document-share add up to more than 1")
        for name in ("num_requests", "max_input_tokens", "system_prompts", "turns", "questions"):
            if not 1 <= getattr(self, name) < math.inf:
                flag = "requests" if name == "num_requests" else name.replace("_", "-")
                raise ConfigError(f"--{flag} must be at least 1")
        if not 0 <= self.system_zipf < 100:
            raise ConfigError("--system-zipf must be 0 (all alike) or more")


_HOUR_S = 3_600

PRESETS = {
    "conversation": WorkloadSpec(
        arrivals=ArrivalSpec(rate=12_031 / _HOUR_S),
        num_requests=12_031,
        input_tokens=LogNormal(10_450, 1.1),
        output_tokens=LogNormal(343, 0.8),
        system_prompts=1,
        system_tokens=Constant(512),
        session_share=0.405,
        turns=2.6,
        turn_tokens=LogNormal(1_250, 1.3),
        think_s=LogNormal(170, 0.9),
    ),
    "tool-agent": WorkloadSpec(
        arrivals=ArrivalSpec(rate=23_608 / _HOUR_S),
        num_requests=23_608,
        input_tokens=LogNormal(3_930, 1.1),
        output_tokens=LogNormal(182, 0.9),
        system_prompts=40,
        system_zipf=1.2,
        system_tokens=LogNormal(3_680, 0.2),
        session_share=0.105,
        turns=4.0,
        turn_tokens=LogNormal(700, 1.0),
        think_s=LogNormal(30, 1.0),
    ),
    "synthetic": WorkloadSpec(
        arrivals=ArrivalSpec(rate=3_993 / _HOUR_S),
        num_requests=3_993,
        input_tokens=LogNormal(2_500, 1.1),
        output_tokens=LogNormal(149, 0.9),
        system_share=0.0,
        session_share=0.5,
        turns=3.0,
        turn_tokens=LogNormal(300, 1.0),
        think_s=LogNormal(60, 1.0),
        document_share=0.5,
        questions=3.3,
        document_tokens=LogNormal(26_300, 0.7),
        question_tokens=LogNormal(150, 0.8),
    ),
}
