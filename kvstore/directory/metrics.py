"""The directory's metrics. Read when scraped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.directory.following import Following

_COUNTERS = (
    ("gaps", "moonserve_directory_gaps", "Times that events of a node were missed."),
    ("resyncs", "moonserve_directory_resyncs", "Inventories taken in."),
    ("lookups", "moonserve_directory_lookups", "Calls that asked who holds blocks."),
    ("replicas_created", "moonserve_directory_replicas_created", "Replicas made."),
    ("replicas_dropped", "moonserve_directory_replicas_dropped", "Replicas removed."),
    ("copies_failed", "moonserve_directory_copies_failed", "Copies that were not done in full."),
    ("drops_failed", "moonserve_directory_drops_failed", "Removals that nodes did not answer."),
)


class DirectoryCollector(Collector):
    """`counters` are those of the directory's parts, apart by name."""

    def __init__(self, following: Following, counters: Sequence[Mapping[str, int]]) -> None:
        self._following = following
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        followers = list(self._following.followers.values())
        index = self._following.directory
        in_step = sum(follower.in_step for follower in followers)
        gauges = (
            ("moonserve_directory_keys", "Blocks in the index.", len(index)),
            ("moonserve_directory_bytes", "Memory of the index.", index.table.nbytes),
            ("moonserve_directory_nodes", "Store nodes that are followed.", len(followers)),
            ("moonserve_directory_nodes_in_step", "Of them, without a gap.", in_step),
        )
        for name, help_text, value in gauges:
            yield GaugeMetricFamily(name, help_text, value=value)
        counts = {name: n for counters in self._counters for name, n in list(counters.items())}
        for counter, name, help_text in _COUNTERS:
            yield CounterMetricFamily(name, help_text, value=counts.get(counter, 0))
