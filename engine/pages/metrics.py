"""A page pool's metrics. Read when scraped; whoever owns the registry serves them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.pages.latency import Counts, cumulative, percentile_s, sum_s
from engine.pages.pool import PagePool

_COUNTERS = (
    ("allocations", "moonserve_pages_allocations", "Allocations that got their blocks."),
    ("allocated", "moonserve_pages_allocated_blocks", "Blocks handed out."),
    ("freed", "moonserve_pages_freed_blocks", "Blocks given back."),
    ("refusals", "moonserve_pages_refusals", "Attempts for which there was not enough."),
    ("evictions", "moonserve_pages_evictions", "Requests evicted."),
    ("evicted_blocks", "moonserve_pages_evicted_blocks", "Blocks of evicted requests."),
    ("in_place", "moonserve_pages_extended_in_place", "Allocations beside what was held."),
)
_STATES = ("free", "held", "held_high", "promised", "promised_high", "retired")
QUANTILES = (50.0, 99.0, 99.9)


class PagesCollector(Collector):
    """What one pool counts, under a name; asked for in the scraping thread."""

    def __init__(self, name: str, pool: PagePool) -> None:
        self._name = name
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        stats = self._pool.stats()
        for counter, name, text in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=("pool",))
            family.add_metric((self._name,), getattr(stats, counter))
            yield family
        yield self._outcomes()
        blocks = GaugeMetricFamily(
            "moonserve_pages_blocks", "Blocks by what they are.", labels=("pool", "state")
        )
        for state in _STATES:
            blocks.add_metric((self._name, state), getattr(stats, state))
        yield blocks
        yield self._gauge("moonserve_pages_requests", "That hold blocks.", stats.requests)
        evictable = stats.evictable + stats.evictable_high
        yield self._gauge("moonserve_pages_evictable_requests", "At rest.", evictable)
        yield self._gauge("moonserve_pages_runs", "Blocks side by side.", stats.runs)
        yield self._gauge("moonserve_pages_waiting", "Who waits.", self._pool.num_waiting)
        yield self._gauge("moonserve_pages_metadata_bytes", "Of tables.", stats.metadata_bytes)
        yield from self._durations(self._pool.latencies())

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("pool",))
        family.add_metric((self._name,), value)
        return family

    def _outcomes(self) -> Metric:
        family = CounterMetricFamily(
            "moonserve_pages_short",
            "Allocations for which there was not enough, also after eviction, by what became of them.",
            labels=("pool", "outcome"),
        )
        for outcome, count in self._pool.outcomes().items():
            family.add_metric((self._name, outcome), count)
        return family

    def _durations(self, counts: Counts) -> Iterator[Metric]:
        histogram = HistogramMetricFamily(
            "moonserve_pages_allocation_seconds",
            "How long an attempt to allocate took, without waiting for blocks.",
            labels=("pool",),
        )
        buckets = [(f"{bound:g}", count) for bound, count in cumulative(counts)]
        buckets.append(("+Inf", int(counts.sum())))
        histogram.add_metric((self._name,), buckets, sum_s(counts))
        yield histogram
        quantiles = GaugeMetricFamily(
            "moonserve_pages_allocation_quantile_seconds",
            "The same: within which so many of a hundred were done.",
            labels=("pool", "quantile"),
        )
        for percent in QUANTILES:
            labels = self._name, f"{percent / 100:g}"
            quantiles.add_metric(labels, percentile_s(counts, percent))
        yield quantiles
