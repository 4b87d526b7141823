"""What Prometheus reads of a transfer engine, per transport, rail and peer.

A collector: nothing is counted here, the engine's own counters are read when somebody asks. Bytes and slices
are those that this process asked for, as initiator; the peer's side of them is not counted again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from transfer.base import Op
from transfer.engine import TransferEngine
from transfer.stats import BUCKETS_S, Incident, PathStats

_LABELS = ("transport", "rail", "peer")
_INCIDENTS = {
    Incident.RETRY: "Slices sent again after they failed on this rail.",
    Incident.FAILOVER: "Of the retries, those that took another way.",
    Incident.FAILURE: "Slices that failed for good.",
    Incident.CORRUPT: "Slices that arrived with another checksum.",
    Incident.CONNECT: "Connections opened.",
    Incident.BREAK: "Connections that broke, or could not be had.",
    Incident.REST: "Times that the rail was left alone after errors.",
}
_LIMITS = (*(str(bound) for bound in BUCKETS_S), "+Inf")


class TransferCollector(Collector):
    """Register it once per engine; the engine need not have started."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        paths = list(self._engine.stats)
        yield from _traffic(paths)
        yield from _incidents(paths)
        yield from _in_flight(paths)
        yield from self._usage()

    def _usage(self) -> Iterator[Metric]:
        usage = self._engine.usage()
        for name, text, value in (
            ("segments", "Registered memory regions.", usage.num_segments),
            ("segment_bytes", "Bytes of registered memory.", usage.segment_bytes),
            ("open_windows", "Rights to write that peers have.", usage.num_windows),
            ("served_connections", "Connections that peers have opened.", usage.num_served),
            ("endpoints", "Connections that this process has opened.", usage.num_endpoints),
        ):
            yield GaugeMetricFamily(f"moonserve_transfer_{name}", text, value)


def _traffic(paths: list[PathStats]) -> Iterator[Metric]:
    moved = CounterMetricFamily(
        "moonserve_transfer_bytes", "Bytes that arrived.", labels=(*_LABELS, "op")
    )
    slices = CounterMetricFamily(
        "moonserve_transfer_slices", "Slices that arrived.", labels=_LABELS
    )
    seconds = HistogramMetricFamily(
        "moonserve_transfer_seconds", "From a slice's request to its end.", labels=_LABELS
    )
    for path in paths:
        labels = _labels(path)
        moved.add_metric((*labels, Op.READ.value), path.read_bytes)
        moved.add_metric((*labels, Op.WRITE.value), path.written_bytes)
        counts = list(accumulate(path.latency_counts))
        slices.add_metric(labels, counts[-1])
        seconds.add_metric(labels, list(zip(_LIMITS, counts, strict=True)), path.latency_sum_s)
    yield from (moved, slices, seconds)


def _incidents(paths: list[PathStats]) -> Iterator[Metric]:
    for incident, text in _INCIDENTS.items():
        family = CounterMetricFamily(f"moonserve_transfer_{incident.value}", text, labels=_LABELS)
        for path in paths:
            family.add_metric(_labels(path), path.incidents[incident])
        yield family


def _in_flight(paths: list[PathStats]) -> Iterator[Metric]:
    slices = GaugeMetricFamily(
        "moonserve_transfer_slices_in_flight", "Slices asked for.", labels=_LABELS
    )
    waiting = GaugeMetricFamily(
        "moonserve_transfer_bytes_in_flight", "Bytes submitted and not ended.", labels=_LABELS
    )
    for path in paths:
        slices.add_metric(_labels(path), path.num_in_flight)
        waiting.add_metric(_labels(path), path.bytes_in_flight)
    yield from (slices, waiting)


def _labels(path: PathStats) -> tuple[str, str, str]:
    return path.transport, path.rail, path.peer
