"""Counts and durations that one thread takes tens of thousands of times a second, as Prometheus reads them.

prometheus_client's own may be changed by any thread, and so take a lock for each of their parts and go through buckets
one by one: an eighth of what a streamed token cost the gateway. These are additions. They may be read by any thread,
meanwhile too: then a sum can be an observation ahead of its buckets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count(Collector):
    """Of things that happened."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str]) -> None:
        """`name` without `_total`."""
        self._name, self._text, self._labels = name, text, labels
        self._count = 0

    def add(self, count: int) -> None:
        self._count += count

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), self._count)
        yield family


class Durations(Collector):
    """A histogram."""

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], bounds_s: Sequence[float]
    ) -> None:
        """`bounds_s`: the greatest duration of each bucket, growing."""
        self._name, self._text, self._labels = name, text, labels
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)  # by bucket; the last one has no bound
        self._sum_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += times
        self._sum_s += seconds * times

    def collect(self) -> Iterator[Metric]:
        bounds = map(floatToGoString, (*self._bounds_s, float("inf")))
        buckets = list(zip(bounds, accumulate(list(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), buckets, self._sum_s)
        yield family
