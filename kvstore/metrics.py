"""Prometheus metrics of a store node: Mooncake's names for metrics of its master, ours for the rest."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonserve.kvstore.disk.base import DiskUsage, Health
from moonserve.kvstore.state.objects import Usage
from moonserve.protocol.process.metrics import by_label

_COUNTERS = (
    ("evictions_attempted", "master_attempted_evictions", "Evictions tried."),
    ("evictions_succeeded", "master_successful_evictions", "Evictions that freed space."),
    ("integrity_failures", "moonserve_integrity_failures", "Objects dropped for a checksum."),
    ("objects_stored", "moonserve_store_objects_stored", "Objects committed here."),
    ("objects_restored", "moonserve_store_objects_restored", "Objects found on disk at start."),
    ("objects_copied", "moonserve_store_replicas_created", "Objects copied from other nodes."),
    ("lease_hits", "moonserve_store_hits", "Objects asked for and found."),
    ("lease_misses", "moonserve_store_misses", "Objects asked for and not found."),
    ("demotions", "moonserve_store_demotions", "Objects written to disk for being cold."),
    ("promotions", "moonserve_store_promotions", "Objects read back from disk."),
    ("wishes_refused", "moonserve_store_refused", "Objects for which there was no room."),
    ("disk_reads_failed", "moonserve_store_disk_reads_failed", "Objects lost on disk."),
    ("objects_outdated", "moonserve_store_outdated", "Objects removed or replaced unheard."),
    ("removals_unsaved", "moonserve_store_removals_unsaved", "Removals the disk did not take."),
    ("copies_dropped", "moonserve_store_copies_dropped", "Copies on disk dropped for others."),
    ("objects_lost_with_disk", "moonserve_store_lost_with_disk", "Objects a failed disk took."),
)


class StoreCollector(Collector):
    """Collects a node's metrics at each scrape. The functions are called in the scraping thread."""

    def __init__(
        self,
        usage: Callable[[], Usage],
        counters: Mapping[str, int],
        disk: Callable[[], tuple[Health, DiskUsage, Mapping[str, int]] | None],
    ) -> None:
        self._usage = usage
        self._counters = counters
        self._disk = disk

    def collect(self) -> Iterator[Metric]:
        yield from self._of_memory(self._usage())
        counters = dict(self._counters)
        for counter, name, help_text in _COUNTERS:
            yield CounterMetricFamily(name, help_text, value=counters.get(counter, 0))
        disk = self._disk()
        if disk is not None:
            yield from _of_disk(*disk)

    def _of_memory(self, usage: Usage) -> Iterator[Metric]:
        figures = (
            ("master_key_count", "Visible objects.", usage.num_objects),
            ("master_allocated_bytes", "Bytes in use.", usage.capacity_bytes - usage.free_bytes),
            ("master_total_capacity_bytes", "Bytes in all.", usage.capacity_bytes),
            ("moonserve_store_objects_on_disk", "Objects only there.", usage.num_on_disk),
        )
        for name, help_text, value in figures:
            yield GaugeMetricFamily(name, help_text, value=value)
        parts = ("free", "held", "leased", "reserved")
        states = {part: getattr(usage, f"{part}_bytes") for part in parts}
        text = "Bytes of memory by what they are."
        yield by_label(GaugeMetricFamily, "moonserve_store_memory_bytes", text, "state", states)
        text, quotas = "Bytes of tenants with a quota.", usage.tenant_bytes
        yield by_label(GaugeMetricFamily, "moonserve_store_tenant_bytes", text, "tenant", quotas)


def _of_disk(health: Health, usage: DiskUsage, counters: Mapping[str, int]) -> Iterator[Metric]:
    yield GaugeMetricFamily("moonserve_store_disk_healthy", "1 = the disk serves.", value=health is Health.GOOD)
    states = {state: getattr(usage, state) for state in ("live", "dead", "free")}
    text = "Bytes of disk by what they are."
    yield by_label(GaugeMetricFamily, "moonserve_store_disk_bytes", text, "state", states)
    text = "What the disk tier counts."
    yield by_label(CounterMetricFamily, "moonserve_store_disk_events", text, "event", counters)
