"""What Prometheus reads of a prefill worker's dealings with stores. Nothing is counted here: the figures are the
automaton's, read when somebody asks, in the asking thread."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prefill_worker.load_or_compute import PrefixLoads

_COUNTERS = (
    ("reads", "moonserve_prefix_load_reads", "Runs of prefix blocks read, or tried."),
    ("failures", "moonserve_prefix_load_failures", "Of them, those that failed."),
    ("skipped", "moonserve_prefix_load_skipped", "Runs computed since reading looked slower."),
    ("num_bytes", "moonserve_prefix_load_bytes", "Bytes of prefix read."),
    ("seconds", "moonserve_prefix_load_seconds", "Time that reads took, failed ones too."),
    ("predicted_s", "moonserve_prefix_load_predicted_seconds", "Time predicted for these reads."),
)


class PrefixLoadCollector(Collector):
    """Per store: what was read, predicted and actual time, and the speed that is assumed now."""

    def __init__(self, loads: PrefixLoads) -> None:
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        figures = self._loads.figures()
        for field, name, text in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=("store",))
            for store, figure in figures.items():
                family.add_metric((store,), getattr(figure, field))
            yield family
        latency = GaugeMetricFamily(
            "moonserve_prefix_load_latency_seconds", "Measured lately.", labels=("store",)
        )
        rate = GaugeMetricFamily(
            "moonserve_prefix_load_bytes_per_second", "Measured lately.", labels=("store",)
        )
        for store, speed in self._loads.speeds().items():
            latency.add_metric((store,), speed.latency_s)
            rate.add_metric((store,), 1 / speed.s_per_byte)
        yield latency
        yield rate
