"""Metric types, and the ways to read a process's metrics: HTTP endpoint, and the `Metrics` service.

The module that measures something defines its metrics. Names that vLLM and Mooncake dashboards read are kept; all
others start with `moonserve_`. Units are seconds and bytes.
"""

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import accumulate

import grpc.aio
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.pb import metrics_pb2, metrics_pb2_grpc
from moonserve.protocol.process.event_loop import LoopRunner
from moonserve.protocol.rpc.grpc_transport import Context


class FastCounter(Collector):
    """Counter without locks, for one thread that increments it tens of thousands of times a second.

    The locks of prometheus_client's counter took an eighth of what a streamed token costs the gateway. Any thread may
    read this counter at any time.
    """

    def __init__(self, name: str, text: str, labels: Mapping[str, str]) -> None:
        """`name` excludes the suffix `_total`."""
        self._name, self._text, self._labels = name, text, labels
        self._count = 0

    def add(self, count: int) -> None:
        self._count += count

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), self._count)
        yield family


def by_label(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    """Returns a metric with one label. `values`: by the label's value."""
    made = family(name, text, labels=(label,))
    for value, number in values.items():
        made.add_metric((value,), number)
    return made


class FastHistogram(Collector):
    """Histogram without locks, for one writing thread. A concurrent reader may see a sum ahead of the buckets."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], bounds_s: Sequence[float]) -> None:
        """`bounds_s`: the upper bound of each bucket, ascending."""
        self._name, self._text, self._labels = name, text, labels
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)  # by bucket; the last one is unbounded
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


@contextlib.contextmanager
def http_endpoint(registry: CollectorRegistry, host: str, port: int) -> Iterator[None]:
    """Serves the registry over HTTP in a thread within the block. Port 0 disables it.

    Raises ConfigError if it cannot listen on the port."""
    if not port:
        yield
        return
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"--metrics-port {port}: {error}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def process_registry() -> CollectorRegistry:
    """Returns a registry with the system's figures of this process (`process_cpu_seconds_total`,
    `process_resident_memory_bytes`, …) and the running version."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    info = Gauge("moonserve_info", "1; the version that runs.", ("version",), registry=registry)
    info.labels(package_version()).set(1)
    return registry


def package_version() -> str:
    """Returns the version of the installed package, or "unknown"."""
    try:
        return metadata.version("moonserve")
    except metadata.PackageNotFoundError:
        return "unknown"  # runs from a source tree that is not installed


def add_metrics_service(
    server: grpc.aio.Server,
    instance_id: str,
    registry: CollectorRegistry,
    rails: Callable[[], Iterable[metrics_pb2.Rail]] = tuple,
) -> None:
    """Adds the `Metrics` service for `registry` and `rails`. Must be called before the server starts."""
    servicer = MetricsServicer(instance_id, registry, rails)
    metrics_pb2_grpc.add_MetricsServicer_to_server(servicer, server)


@dataclass(eq=False, slots=True)
class MetricsServicer(metrics_pb2_grpc.MetricsServicer):
    """gRPC service `Metrics` on the process's RPC server, through which other processes read its metrics.

    It reads in the event loop, so that collectors see the state of the process between two events."""

    instance_id: str
    registry: CollectorRegistry
    rails: Callable[[], Iterable[metrics_pb2.Rail]]

    async def Rails(self, request: metrics_pb2.RailsRequest, context: Context) -> metrics_pb2.RailsReply:
        return metrics_pb2.RailsReply(instance_id=self.instance_id, rails=self.rails())

    async def Scrape(self, request: metrics_pb2.ScrapeRequest, context: Context) -> metrics_pb2.ScrapeReply:
        return metrics_pb2.ScrapeReply(instance_id=self.instance_id, text=generate_latest(self.registry))


class LoopCollector(Collector):
    """Collector that runs `collect` in the event loop of its creation, for any calling thread.

    State that only the loop changes is consistent there."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        if _running_loop() is self._loop:
            return self._collect()
        return iter(LoopRunner(self._loop).run(lambda: list(self._collect())))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
