"""Metrics of a process's transfer engine, for Prometheus and for the conductor.

Counts nothing itself: the engine's counters are read on demand. They cover the bytes and slices that this process
requested as initiator; the peer does not count them again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from moonserve.protocol.pb import conductor_pb2, metrics_pb2
from moonserve.protocol.process.metrics import http_endpoint, process_registry
from moonserve.protocol.rpc.wire import to_message
from moonserve.transfer.config import FaultPlan, TransferOptions
from moonserve.transfer.engine import TransferEngine
from moonserve.transfer.paths.traffic_stats import BUCKETS_S, Incident, PathStats, TransferStats
from moonserve.transfer.transport_interface import Op

_LABELS = ("transport", "rail", "peer")
_INCIDENTS = {
    Incident.RETRY: "Slices sent again after they failed on this rail.",
    Incident.FAILOVER: "Of the retries, those that took another way.",
    Incident.FAILURE: "Slices that failed for good.",
    Incident.CORRUPT: "Slices that arrived with another checksum.",
    Incident.CONNECT: "Connections opened.",
    Incident.BREAK: "Connections that broke, or could not be had.",
    Incident.COOLDOWN: "Times that the rail was left alone after errors.",
}
_LIMITS = (*(str(bound) for bound in BUCKETS_S), "+Inf")


class TransferCollector(Collector):
    """Collects one engine's metrics. Register it once per engine, which need not have started."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        paths = [((path.transport, path.rail, path.peer), path) for path in self._engine.stats]
        moved = CounterMetricFamily("moonserve_transfer_bytes", "Bytes that arrived.", labels=(*_LABELS, "op"))
        seconds = HistogramMetricFamily(
            "moonserve_transfer_seconds", "From a slice's request to its end.", labels=_LABELS
        )
        for labels, path in paths:
            moved.add_metric((*labels, Op.READ.value), path.totals.bytes[0])
            moved.add_metric((*labels, Op.WRITE.value), path.totals.bytes[1])
            counts = zip(_LIMITS, accumulate(path.totals.counts), strict=True)
            seconds.add_metric(labels, list(counts), path.totals.sum_ns / 1e9)
        yield from (moved, seconds)
        counters = [
            ("slices", "Slices that arrived.", lambda path: sum(path.totals.counts)),
            *((each.value, text, _count_of(each)) for each, text in _INCIDENTS.items()),
        ]
        gauges = [
            ("slices_in_flight", "Slices asked for.", lambda path: path.totals.num_in_flight),
            ("bytes_in_flight", "Bytes submitted and not ended.", lambda p: p.totals.bytes_in_flight),
        ]
        yield from _by_path(CounterMetricFamily, counters, paths)
        yield from _by_path(GaugeMetricFamily, gauges, paths)
        usage = self._engine.usage()
        for name, text, value in (
            ("segments", "Registered memory regions.", usage.num_segments),
            ("segment_bytes", "Bytes of registered memory.", usage.segment_bytes),
            ("open_windows", "Rights to write that peers have.", usage.num_windows),
            ("served_connections", "Connections that peers have opened.", usage.num_served),
            ("endpoints", "Connections that this process has opened.", usage.num_endpoints),
        ):
            yield GaugeMetricFamily(f"moonserve_transfer_{name}", text, value)


def _by_path(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily],
    figures: Sequence[tuple[str, str, Callable[[PathStats], float]]],
    paths: Sequence[tuple[Sequence[str], PathStats]],
) -> Iterator[Metric]:
    for name, text, value_of in figures:
        made = family(f"moonserve_transfer_{name}", text, labels=_LABELS)
        for labels, path in paths:
            made.add_metric(labels, value_of(path))
        yield made


def _count_of(incident: Incident) -> Callable[[PathStats], float]:
    return lambda path: path.incidents[incident]


class EngineProcessConfig(Protocol):
    """Configuration of a cluster process that has a transfer engine."""

    @property
    def cluster_token(self) -> str: ...
    @property
    def instance_id(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def metrics_port(self) -> int: ...

    def transfer_options(self, host: str) -> TransferOptions: ...


@contextmanager
def engine_with_metrics(
    config: EngineProcessConfig, faults: FaultPlan | None = None
) -> Iterator[tuple[TransferEngine, CollectorRegistry]]:
    """Starts an engine and exposes the process's metrics until exit. Yields both. Raises ConfigError."""
    engine = TransferEngine(
        cluster_token=config.cluster_token,
        name=config.instance_id,
        options=config.transfer_options(config.host),
        faults=faults,
    )
    registry = process_registry()
    registry.register(TransferCollector(engine))
    with engine, http_endpoint(registry, config.host, config.metrics_port):
        yield engine, registry


_COPIED_BYTES = 8 << 20
"""Exceeds a core's caches and takes a few milliseconds to copy."""
_COPIES = 3


def peer_traffic(stats: TransferStats) -> Iterator[conductor_pb2.Traffic]:
    """Yields totals per peer with measured traffic. A peer's name is its instance id."""
    for peer, totals in stats.bandwidth_totals().items():
        if totals.read_bytes or totals.written_bytes:
            yield to_message(conductor_pb2.Traffic, totals, peer=peer)


def rail_totals(stats: TransferStats) -> Iterator[metrics_pb2.Rail]:
    """Yields totals per transport and rail over all peers."""
    by_rail: dict[tuple[str, str], metrics_pb2.Rail] = {}
    for path in stats:
        key = path.transport, path.rail
        rail = by_rail.setdefault(key, metrics_pb2.Rail(transport=key[0], rail=key[1]))
        rail.read_bytes += path.totals.bytes[0]
        rail.written_bytes += path.totals.bytes[1]
        rail.failures += path.incidents[Incident.FAILURE]
        rail.retries += path.incidents[Incident.RETRY]
        rail.bytes_in_flight += path.totals.bytes_in_flight
    yield from by_rail.values()


def copy_bytes_per_s(memory: memoryview) -> float:
    """Measures the copy rate out of resident memory; a transfer within a host is one such copy. Returns the fastest of
    a few runs, since disturbances only slow a copy down."""
    nbytes = min(len(memory), _COPIED_BYTES)
    here = bytearray(nbytes)  # resident before the timing starts
    taken_s = [_copied_s(memory[:nbytes], here) for _ in range(_COPIES)]
    return nbytes / max(min(taken_s), 1e-9)


def private_copy_bytes_per_s(nbytes: int) -> float:
    """Measures the copy rate from private memory, since reading elastic memory would make its pages resident."""
    return copy_bytes_per_s(memoryview(bytearray(b"\1") * min(nbytes, _COPIED_BYTES)))


def _copied_s(source: memoryview, target: bytearray) -> float:
    began = time.perf_counter()
    target[:] = source
    return time.perf_counter() - began
