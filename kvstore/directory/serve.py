"""The directory's process from start to stop: registry, followers, replication, listeners, metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prometheus_client import CollectorRegistry

from kvstore.directory.config import DirectoryConfig
from kvstore.directory.following import Following
from kvstore.directory.index import Directory
from kvstore.directory.metrics import DirectoryCollector
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

DIRECTORY_ROLE = "directory"
STOP_GRACE_S = 0.5


class DirectoryProcess:
    """One directory; it owns nothing that would be missed."""

    def __init__(self, config: DirectoryConfig, metrics: CollectorRegistry) -> None:
        self._config = config
        self._server = RpcServer(config.cluster_token, config.tls())
        self._channels = Channels(config.cluster_token, config.tls())
        directory = Directory()
        heat = Heat(threshold=config.hot_hits, window_s=config.hot_window_s)
        clock = asyncio.get_running_loop().time  # monotonic
        self._following = Following(
            directory, self._channels, lambda keys: heat.record(keys, clock()), clock
        )
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
        """Serves until told to stop. Raises ConfigError when the port is taken, or what ended the membership."""
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
        """The cluster's, or one that this process holds and serves."""
        if self._config.registry is not None:
            return connect(
                self._config.registry,
                cluster_token=self._config.cluster_token,
                tls=self._config.tls(),
            )
        embedded = EmbeddedRegistry()
        registry_pb2_grpc.add_RegistryServicer_to_server(
            RegistryService(embedded), self._server.grpc
        )
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
    """Runs a directory until the process is told to stop. Raises ConfigError when it cannot start."""
    metrics = process_registry()
    with exposed(metrics, config.host, config.metrics_port):
        await DirectoryProcess(config, metrics).run(lifecycle)
