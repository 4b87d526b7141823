"""Distributions of lengths and times, as users write them: `300`, `lognormal:MEAN:SIGMA`, `empirical:FILE`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from protocol.errors import ConfigError


class Draws(Protocol):
    """A distribution of non-negative numbers."""

    def draw(self, random: Random) -> float:
        """One number."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same."""

    value: float

    def draw(self, random: Random) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lognormal with this mean; `sigma`: deviation of the logarithm (1: the 90th percentile is 2.2 × the mean)."""

    mean: float
    sigma: float

    def draw(self, random: Random) -> float:
        return random.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)


@dataclass(frozen=True, slots=True)
class Empirical:
    """One of the values, each as likely."""

    values: tuple[float, ...]

    def draw(self, random: Random) -> float:
        return random.choice(self.values)


def draw_tokens(draws: Draws, random: Random) -> int:
    """A number of tokens, at least 1."""
    return max(1, round(draws.draw(random)))


def parse_draws(text: str, flag: str) -> Draws:
    """Raises ConfigError that names the flag and shows how it is written."""
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
