"""Token times of a request and the figures derived from them: TTFT, TBT, TPOT, E2E, and both objectives. Pure.

Replay reports, benchmarks and simulator share these definitions. Times are monotonic seconds of one clock; clocks of
different hosts are never mixed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeline:
    """Arrival of one finished request and the time of each of its tokens, in order."""

    arrived_at: float
    token_at: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """Time from arrival to first token. Raises IndexError if there are no tokens."""
        return self.token_at[0] - self.arrived_at

    @property
    def e2e_s(self) -> float:
        return self.token_at[-1] - self.arrived_at

    @property
    def gaps_s(self) -> list[float]:
        """Gaps between consecutive tokens (ITL)."""
        return [b - a for a, b in zip(self.token_at, self.token_at[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; 0 for a single token."""
        count = len(self.token_at) - 1
        return (self.token_at[-1] - self.token_at[0]) / count if count else 0.0

    @property
    def tbt_s(self) -> float:
        """Mean of the longest 10 % of the gaps (Mooncake, FAST'25); 0 for a single token."""
        return mean_of_longest(self.gaps_s)

    def meets(self, *, ttft_slo_s: float, tbt_slo_s: float) -> bool:
        """Returns true if the request is *effective*: it meets both objectives."""
        return self.ttft_s <= ttft_slo_s and self.tbt_s <= tbt_slo_s


def mean_of_longest(gaps_s: Sequence[float]) -> float:
    """Returns the mean of the longest tenth of a request's gaps, their number rounded up; 0 if there are none."""
    longest = sorted(gaps_s, reverse=True)[: math.ceil(len(gaps_s) / 10)]
    return sum(longest) / len(longest) if longest else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile by linear interpolation between closest ranks; NaN if there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def mean(values: Sequence[float]) -> float:
    """Returns the mean; NaN if there are no values."""
    return sum(values) / len(values) if values else math.nan
