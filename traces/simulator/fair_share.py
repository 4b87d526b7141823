"""Max-min fair rates of flows over shared links, by progressive filling. Pure arithmetic.

Every flow's rate rises evenly until one of its links is full or its own limit is reached; the others go on rising. So
no flow can get more without taking from one that has no more than it (Bertsekas and Gallager, Data Networks, §6.5.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Demand(NamedTuple):
    """One flow as it asks for bandwidth."""

    links: tuple[int, ...]
    limit: float = math.inf  # it wants no more than this


def fair_rates(demands: Sequence[Demand], capacity: Mapping[int, float]) -> list[float]:
    """The rate of each demand, in the units of `capacity`, which has all links that are named."""
    if len(demands) == 1:  # most flows are alone
        links, limit = demands[0]
        return [min(limit, min((capacity[link] for link in links), default=math.inf))]
    rates = [0.0] * len(demands)
    left: dict[int, float] = {}
    num_on: dict[int, int] = {}
    for demand in demands:
        for link in demand.links:
            left[link] = capacity[link]
            num_on[link] = num_on.get(link, 0) + 1
    rising = list(range(len(demands)))
    while rising:
        level, bottleneck = _first_full(left, num_on)
        limited = [i for i in rising if demands[i].limit <= level]
        full = limited or [
            i for i in rising if bottleneck is None or bottleneck in demands[i].links
        ]
        for i in full:
            rates[i] = min(demands[i].limit, level)
            for link in demands[i].links:
                left[link] = max(left[link] - rates[i], 0.0)
                num_on[link] -= 1
        stopped = set(full)
        rising = [i for i in rising if i not in stopped]
    return rates


def _first_full(left: Mapping[int, float], num_on: Mapping[int, int]) -> tuple[float, int | None]:
    """The even rate at which the first link is full, and that link; infinite and None where no flow uses one."""
    level, bottleneck = math.inf, None
    for link, count in num_on.items():
        if count and left[link] / count < level:
            level, bottleneck = left[link] / count, link
    return level, bottleneck
