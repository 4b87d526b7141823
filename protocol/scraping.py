"""Prometheus registry of every process and the `Metrics` service over which other processes read it.

The service uses the process's existing RPC server. It reads in the event loop, so that collectors see the state of the
process between two events. The module does not know what is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from protocol.in_loop import InLoop
from protocol.pb import metrics_pb2, metrics_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


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


def serve_metrics(
    server: grpc.aio.Server,
    instance_id: str,
    registry: CollectorRegistry,
    rails: Callable[[], Iterable[metrics_pb2.Rail]] = tuple,
) -> None:
    """Adds the `Metrics` service for `registry` and `rails`. Must be called before the server starts."""
    servicer = MetricsServicer(instance_id, registry, rails)
    metrics_pb2_grpc.add_MetricsServicer_to_server(servicer, server)


class MetricsServicer(metrics_pb2_grpc.MetricsServicer):
    """gRPC service `Metrics`."""

    def __init__(
        self,
        instance_id: str,
        registry: CollectorRegistry,
        rails: Callable[[], Iterable[metrics_pb2.Rail]],
    ) -> None:
        self._instance_id = instance_id
        self._registry = registry
        self._rails = rails

    async def Rails(self, request: metrics_pb2.RailsRequest, context: Context) -> metrics_pb2.RailsReply:
        return metrics_pb2.RailsReply(instance_id=self._instance_id, rails=self._rails())

    async def Scrape(self, request: metrics_pb2.ScrapeRequest, context: Context) -> metrics_pb2.ScrapeReply:
        return metrics_pb2.ScrapeReply(instance_id=self._instance_id, text=generate_latest(self._registry))


class LoopCollector(Collector):
    """Collector that runs `collect` in the event loop of its creation, for any calling thread.

    State that only the loop changes is consistent there."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        if _running_loop() is self._loop:
            return self._collect()
        return iter(InLoop(self._loop).run(lambda: list(self._collect())))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
