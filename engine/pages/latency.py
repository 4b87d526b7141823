"""How long allocations took: a histogram with eight buckets per power of two, in nanoseconds. `latency.h` has it too.

A percentile is the upper bound of its bucket: never too low, and at most an eighth too high.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NUM_BUCKETS = 320
"""Up to 2**42 ns; what takes longer counts as that."""
_FINE = 3  # bits below the highest one that tell buckets apart

Counts = npt.NDArray[np.uint64]


def bucket_of(nanoseconds: int) -> int:
    shift = max(0, nanoseconds.bit_length() - 1 - _FINE)
    return min((shift << _FINE) + (nanoseconds >> shift), NUM_BUCKETS - 1)


def upper_bound(bucket: int) -> int:
    """Nanoseconds that are the first of the next bucket."""
    shift = max(0, (bucket >> _FINE) - 1)
    return (bucket - (shift << _FINE) + 1) << shift


def percentile_s(counts: Counts, percent: float) -> float:
    """Seconds within which so many per cent were done; 0 when there was none."""
    total = int(counts.sum())
    if not total:
        return 0.0
    reached = np.cumsum(counts) >= total * percent / 100
    return upper_bound(int(np.argmax(reached))) / 1e9


def sum_s(counts: Counts) -> float:
    """Seconds in all, as if each had taken as long as its bucket's upper bound."""
    bounds = np.fromiter(map(upper_bound, range(NUM_BUCKETS)), np.float64, NUM_BUCKETS)
    return float((counts * bounds).sum()) / 1e9


def cumulative(counts: Counts) -> list[tuple[float, int]]:
    """(seconds, how many took no longer) at each power of two from 128 ns to a minute."""
    reached = np.cumsum(counts)
    return [(2**power / 1e9, int(reached[bucket_of(2**power) - 1])) for power in range(7, 37)]
