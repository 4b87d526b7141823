"""Statistics of a pool: percentiles are never too low, and a refusal says when to retry."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.engine.kv_cache.block_pool import TIMED_EVERY, BlockPool
from moonserve.engine.kv_cache.pool_metrics import QUANTILES, DurationHistogram, ReturnRate, pool_collector


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=50), st.floats(1, 100))
def test_percentiles_are_upper_bounds_at_most_an_eighth_too_high(values: list[int], percent: float) -> None:
    durations = DurationHistogram()
    for value in values:
        durations.add(value)
    true = sorted(values)[max(math.ceil(len(values) * percent / 100) - 1, 0)]
    found = durations.percentile_s(percent) * 1e9
    assert true * (1 - 1e-9) <= found <= true * 9 / 8 * (1 + 1e-9) + 1
    assert durations.sum_s() * 1e9 >= sum(values) * (1 - 1e-9)


def test_cumulative_counts_include_durations_below_their_bound() -> None:
    durations = DurationHistogram()
    assert durations.percentile_s(99) == 0.0, "nothing has no percentile"
    for nanoseconds in (100, 127, 128, 1000, 10**6):
        durations.add(nanoseconds)
    reached = dict(durations.cumulative())
    assert [reached[each] for each in (128e-9, 256e-9, 1024e-9)] == [2, 3, 4]
    assert max(reached.values()) == 5


def test_retry_after_follows_the_rate_of_returned_blocks() -> None:
    turnover = ReturnRate()
    assert turnover.retry_after_s(0.0, 0, 10) == ReturnRate.UNKNOWN_S
    assert turnover.retry_after_s(2.0, 40, 10) == pytest.approx(0.5)  # 20 blocks per second
    assert turnover.retry_after_s(6.0, 120, 10) == pytest.approx(0.5)
    assert turnover.retry_after_s(12.0, 120, 10) == pytest.approx(1.0)  # no block for six seconds
    assert turnover.retry_after_s(18.0, 120, 10) == ReturnRate.LONGEST_S
    assert turnover.retry_after_s(19.0, 10**6, 1) == ReturnRate.SHORTEST_S


async def test_allocations_are_timed_and_exported_to_prometheus() -> None:
    ticks = iter(range(0, 10**9, 1000))
    pool = BlockPool(64, on_added=lambda *_: None, on_removed=lambda _: None, clock_ns=lambda: next(ticks))
    for _ in range(2 * TIMED_EVERY):
        blocks = pool.allocate(1) or []
        pool.release(blocks)
    assert pool.allocate(65) is None
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in pool_collector(lambda: pool).collect()
        for sample in metric.samples
    }
    assert samples["moonserve_pool_allocated_blocks_total",] == 2 * TIMED_EVERY
    assert samples["moonserve_pool_refusals_total",] == 1
    assert samples["moonserve_pool_allocation_seconds_count",] == 2
    for percent in QUANTILES:
        value = samples["moonserve_pool_allocation_quantile_seconds", f"{percent / 100:g}"]
        assert 1e-6 <= value <= 1.125e-6
