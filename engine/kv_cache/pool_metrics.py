"""Statistics and Prometheus metrics of a block pool: allocation times and the rate at which blocks are returned."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from moonserve.protocol.process.metrics import LoopCollector, by_label

NUM_BUCKETS = 64 * 8
"""Enough for durations of 64 bits of nanoseconds."""
QUANTILES = (50.0, 99.0, 99.9)


class DurationHistogram:
    """Histogram of nanoseconds with eight buckets per power of two. A percentile is the upper bound of its bucket:
    never too low and at most an eighth too high."""

    def __init__(self) -> None:
        self.counts = [0] * NUM_BUCKETS

    def add(self, nanoseconds: int) -> None:
        shift = max(0, nanoseconds.bit_length() - 4)
        self.counts[(shift << 3) + (nanoseconds >> shift)] += 1

    def percentile_s(self, percent: float) -> float:
        """Returns the given percentile in seconds; 0 if there are no durations."""
        wanted = sum(self.counts) * percent / 100
        if not wanted:
            return 0.0
        reached = accumulate(self.counts)
        return _bound_s(next(bucket for bucket, sum_ in enumerate(reached) if sum_ >= wanted))

    def sum_s(self) -> float:
        """Returns the sum in seconds, with each duration rounded up to its bucket's upper bound."""
        return sum(count * _bound_s(bucket) for bucket, count in enumerate(self.counts) if count)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Yields (seconds, number of shorter durations) at each power of two from 128 ns to about a second."""
        reached = list(accumulate(self.counts))
        for power in range(7, 31):
            yield 2**power / 1e9, reached[((power - 3) << 3) + 7]


def _bound_s(bucket: int) -> float:
    """Returns the upper bound of a bucket in seconds: the first duration of the next bucket."""
    shift = max(0, (bucket >> 3) - 1)
    return ((bucket - (shift << 3) + 1) << shift) / 1e9


class ReturnRate:
    """Rate at which blocks are returned, measured since the older of two samples at least SPAN_S apart."""

    SPAN_S = 5.0
    UNKNOWN_S = 1.0
    """Answer while the rate is unknown."""
    SHORTEST_S, LONGEST_S = 0.05, 30.0
    """Bounds of the answer: an earlier retry is not worthwhile, and later times cannot be predicted."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []  # (time, blocks returned)

    def retry_after_s(self, now: float, returned: int, short: int) -> float:
        """Returns the seconds until `short` more blocks may be back. `returned`: blocks returned since the start."""
        if not self._samples:
            self._samples = [(now, returned)] * 2
            return self.UNKNOWN_S
        before, last = self._samples
        if now - last[0] >= self.SPAN_S:
            self._samples = [last, (now, returned)]
        if now <= before[0]:
            return self.UNKNOWN_S
        per_s = (returned - before[1]) / (now - before[0])
        wait_s = short / per_s if per_s > 0 else self.LONGEST_S
        return min(max(wait_s, self.SHORTEST_S), self.LONGEST_S)


class PoolCounters(Protocol):
    """What a pool counts (`block_pool.BlockPool`)."""

    num_allocated: int
    num_evicted: int
    num_refused: int
    durations: DurationHistogram


def pool_collector(pool: Callable[[], PoolCounters]) -> LoopCollector:
    """Creates the Prometheus collector of a worker's pool. Call it in the worker's event loop."""

    def collect() -> Iterator[Metric]:
        now = pool()
        for event, count in (("allocated", now.num_allocated), ("evicted", now.num_evicted)):
            yield CounterMetricFamily(f"moonserve_pool_{event}_blocks", f"KV blocks {event}.", value=count)
        yield CounterMetricFamily(
            "moonserve_pool_refusals",
            "Allocations for which there were not enough blocks.",
            value=now.num_refused,
        )
        yield from _durations(now.durations)

    return LoopCollector(collect)


def _durations(durations: DurationHistogram) -> Iterator[Metric]:
    histogram = HistogramMetricFamily(
        "moonserve_pool_allocation_seconds",
        "Time that one call for KV blocks took, without waiting.",
    )
    buckets = [(f"{bound:g}", count) for bound, count in durations.cumulative()]
    buckets.append(("+Inf", sum(durations.counts)))
    histogram.add_metric((), buckets, durations.sum_s())
    yield histogram
    text = "Time within which such a share of the calls for KV blocks was done."
    quantiles = {f"{percent / 100:g}": durations.percentile_s(percent) for percent in QUANTILES}
    yield by_label(GaugeMetricFamily, "moonserve_pool_allocation_quantile_seconds", text, "quantile", quantiles)
