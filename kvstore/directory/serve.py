"""Starts, runs and stops the directory process: registry, followers, replication, listeners, metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.directory.config import DirectoryConfig
from kvstore.directory.follower import Following
from kvstore.directory.index import Directory
from kvstore.directory.service import DirectoryService
from kvstore.replication.heat import Heat
from kvstore.replication.planner import Planner
from kvstore.replication.shell import Replicator
from protocol.membership import own_endpoint
from protocol.metrics import exposed
from protocol.pb import directory_pb2_grpc, registry_pb2_grpc
from protocol.process import Lifecycle, running
from protocol.registry.base import Member, Registry
from protocol.registry.connect import connect
from protocol.registry.embedded import EmbeddedRegistry
from protocol.registry.identity import load_or_create
from protocol.registry.seat import Seat, seated
from protocol.registry.service import RegistryService
from protocol.rpc import Channels, RpcServer
from protocol.scraping import process_registry, serve_metrics

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
    """Collects the directory's metrics at each scrape. `counters` of the parts have distinct names."""

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


DIRECTORY_ROLE = "directory"
STOP_GRACE_S = 0.5


class DirectoryProcess:
    """One directory process. It owns no state that cannot be rebuilt."""

    def __init__(self, config: DirectoryConfig, metrics: CollectorRegistry) -> None:
        self._config = config
        self._server = RpcServer(config.cluster_token, config.tls())
        self._channels = Channels(config.cluster_token, config.tls())
        directory = Directory()
        heat = Heat(threshold=config.hot_hits, window_s=config.hot_window_s)
        clock = asyncio.get_running_loop().time  # monotonic
        self._following = Following(directory, self._channels, lambda keys: heat.record(keys, clock()), clock)
        self._replicator = Replicator(
            Planner(directory, heat, config.limits()),
            self._channels,
            self._following.views,
            self._following.endpoint,
            config.copies_at_once,
            clock,
        )
        self._service = DirectoryService(self._following, self._replicator)
        parts = (self._following, self._replicator, self._service)
        serve_metrics(self._server.grpc, config.instance_id, metrics)
        metrics.register(DirectoryCollector(self._following, [part.counters for part in parts]))

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serves until the lifecycle stops it. Raises ConfigError if the port is taken, or the error that ended the
        membership."""
        directory_pb2_grpc.add_DirectoryServicer_to_server(self._service, self._server.grpc)
        self._server.add_lean("Directory", self._service)
        registry = self._registry()
        address = await self._server.start(self._config.host, self._config.port)
        try:
            async with (
                running(self._following.run(registry)) as following,
                running(self._replicator.run()) as replicating,
                self._seated(registry, address) as seat,
            ):
                lifecycle.ready(rpc=address, lean=self._server.lean_address)
                await lifecycle.until_stopped(following, replicating, seat)
        finally:
            await self._server.stop(STOP_GRACE_S)
            await self._channels.close()
            await registry.close()

    def _registry(self) -> Registry:
        """Connects to the configured registry, or creates one that this process serves."""
        if self._config.registry is not None:
            return connect(
                self._config.registry,
                cluster_token=self._config.cluster_token,
                tls=self._config.tls(),
            )
        embedded = EmbeddedRegistry()
        registry_pb2_grpc.add_RegistryServicer_to_server(RegistryService(embedded), self._server.grpc)
        return embedded

    @contextlib.asynccontextmanager
    async def _seated(self, registry: Registry, address: str) -> AsyncIterator[asyncio.Task[None]]:
        identity = load_or_create(None, self._config.instance_id)
        endpoint = own_endpoint(self._config.instance_id, rpc_address=address, transfer_address="")
        facts = {
            "lean": self._server.lean_address,
            "lean_unix": self._server.lean_unix_address,
        }
        member = Member(endpoint=endpoint, role=DIRECTORY_ROLE, owner=identity.owner, facts=facts)
        async with seated(Seat(registry, member)) as task:
            yield task


async def serve(config: DirectoryConfig, lifecycle: Lifecycle) -> None:
    """Runs a directory until the process is stopped. Raises ConfigError if it cannot start."""
    metrics = process_registry()
    with exposed(metrics, config.host, config.metrics_port):
        await DirectoryProcess(config, metrics).run(lifecycle)
