"""The histogram of durations: its buckets cover all, in order, and percentiles are never too low."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.pages.latency import (
    NUM_BUCKETS,
    bucket_of,
    cumulative,
    percentile_s,
    sum_s,
    upper_bound,
)


@given(st.integers(0, 2**42 - 1))
def test_a_bucket_holds_what_is_below_its_bound_and_an_eighth_above_at_most(ns: int) -> None:
    """Each duration is below its bucket's bound, and not in the one before."""
    bucket = bucket_of(ns)
    assert ns < upper_bound(bucket) <= max(ns + 1, ns * 9 // 8 + 1)
    assert bucket == 0 or upper_bound(bucket - 1) <= ns


def test_what_takes_longer_than_an_hour_is_in_the_last_bucket() -> None:
    """Whatever a clock says has a bucket."""
    assert bucket_of(2**63) == NUM_BUCKETS - 1


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=50), st.floats(1, 100))
def test_percentiles_are_upper_bounds_of_the_true_ones(values: list[int], percent: float) -> None:
    """At most an eighth above the sample of that rank."""
    counts = np.zeros(NUM_BUCKETS, np.uint64)
    for value in values:
        counts[bucket_of(value)] += np.uint64(1)
    rank = int(np.ceil(len(values) * percent / 100)) - 1
    true = sorted(values)[max(rank, 0)]
    assert true <= percentile_s(counts, percent) * 1e9 + 1e-6
    assert percentile_s(counts, percent) * 1e9 <= true * 9 / 8 + 1 + 1e-6
    assert sum_s(counts) * 1e9 >= sum(values)


def test_nothing_has_no_percentile() -> None:
    """It is 0 before the first allocation."""
    assert percentile_s(np.zeros(NUM_BUCKETS, np.uint64), 99) == 0.0


def test_cumulative_counts_are_of_durations_up_to_their_bounds() -> None:
    """As Prometheus wants its buckets."""
    counts = np.zeros(NUM_BUCKETS, np.uint64)
    for ns in (100, 127, 128, 1000, 10**6):
        counts[bucket_of(ns)] += np.uint64(1)
    reached = dict(cumulative(counts))
    assert reached[128e-9] == 2
    assert reached[256e-9] == 3
    assert reached[1024e-9] == 4
    assert max(reached.values()) == 5
