"""Serves a worker's elastic memory: runs the background work, the RPC that changes limits, and the metrics.

Also used by workers with fixed memory; their RPCs are refused with that reason. Makes no decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.block_pool import BlockPool
from engine.elastic.elasticity import Elasticity
from protocol.errors import InvalidRequest
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.process import running

Context = grpc.aio.ServicerContext[Any, Any]


class KvMemoryServicer(worker_pb2_grpc.KvMemoryServicer):
    """Serves `KvMemory` and runs the page management. `elasticity`: None if the memory is fixed. `on_change` notifies
    the worker's state."""

    def __init__(self, elasticity: Elasticity | None, on_change: Callable[[], None]) -> None:
        self._elasticity = elasticity
        self._on_change = on_change

    @contextlib.asynccontextmanager
    async def coming_and_going(self, pool: BlockPool) -> AsyncIterator[tuple[asyncio.Task[None], ...]]:
        """Runs page management for `pool` while the block lasts; yields its task, or nothing if memory is fixed."""
        if self._elasticity is None:
            yield ()
            return
        self._elasticity.references = pool.references
        async with running(self._elasticity.run(self._on_change)) as task:
            yield (task,)

    async def GetLimits(self, request: worker_pb2.GetLimitsRequest, context: Context) -> worker_pb2.KvLimits:
        return self._require().limits()

    async def SetLimits(self, request: worker_pb2.SetLimitsRequest, context: Context) -> worker_pb2.KvLimits:
        """Changes the limits. Raises InvalidRequest for invalid limits, ConfigError for floors above the budget."""
        elasticity = self._require()
        elasticity.limit(
            floor=request.floor_bytes if request.HasField("floor_bytes") else None,
            ceiling=request.ceiling_bytes if request.HasField("ceiling_bytes") else None,
            budget=request.budget_bytes if request.HasField("budget_bytes") else None,
        )
        self._on_change()
        return elasticity.limits()

    def _require(self) -> Elasticity:
        if self._elasticity is None:
            raise InvalidRequest("this worker's KV memory is fixed; start it with --elastic-kv-memory")
        return self._elasticity


def show_memory(elasticity: Elasticity | None, registry: CollectorRegistry) -> None:
    """Registers the metrics of elastic memory, if there is any."""
    if elasticity is not None:
        registry.register(ElasticityCollector(elasticity))


_GAUGES = (
    ("ceiling", "May be taken."),
    ("floor", "Can always be had."),
    ("held", "Count as taken."),
    ("resident", "What the machine spends."),
    ("wanted", "What requests wait for."),
)
_COUNTERS = (
    ("populated", "Pages that were there before they were written."),
    ("given_back", "Pages that the machine was given back."),
)


class ElasticityCollector(Collector):
    """Prometheus collector of elastic memory. It runs in the thread of the scrape."""

    def __init__(self, elasticity: Elasticity) -> None:
        self._elasticity = elasticity

    def collect(self) -> Iterator[Metric]:
        limits = self._elasticity.limits()
        gauges = list(_GAUGES)
        if limits.HasField("budget_bytes"):
            gauges.append(("budget", "Of all workers of the host."))
        for name, text in gauges:
            value = getattr(limits, f"{name}_bytes")
            yield GaugeMetricFamily(f"moonserve_kv_memory_{name}_bytes", text, value=value)
        for name, text in _COUNTERS:
            value = getattr(self._elasticity, f"num_{name}")
            yield CounterMetricFamily(f"moonserve_kv_memory_pages_{name}", text, value=value)
