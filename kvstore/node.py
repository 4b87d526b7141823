"""A store node from start to stop: memory, listener, membership, metrics. The service itself is `kvstore.service`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator

from prometheus_client import CollectorRegistry, start_http_server

from kvstore.config import StoreConfig
from kvstore.service import StoreService
from protocol.errors import ConfigError
from protocol.keys import BlockKey
from protocol.membership import BlockLog, Membership
from protocol.metrics import store_metrics
from protocol.pb import common_pb2, conductor_pb2, kvstore_pb2_grpc
from protocol.process import Lifecycle, host_identity
from protocol.request import Endpoint
from protocol.rpc import Channels, RpcServer
from protocol.wire import endpoint_to_wire
from transfer import Segment, TransferEngine

# Calls under way when the process stops answer within milliseconds, a commit of gigabytes within a second.
STOP_GRACE_S = 1.0


class Unannounced:
    """What a node that belongs to no cluster announces to."""

    def added(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Nobody listens."""

    def removed(self, key: BlockKey) -> None:
        """Nobody listens."""


class StoreNode:
    """One node over an allocated segment. Its epoch is the time of its start, so that it grows."""

    def __init__(
        self,
        config: StoreConfig,
        transfer: TransferEngine,
        segment: Segment,
        registry: CollectorRegistry,
    ) -> None:
        self._config = config
        self._endpoint = Endpoint(
            instance_id=config.instance_id,
            epoch=time.time_ns(),
            rpc_address="",  # known once it listens
            transfer_address=transfer.address,
            host=host_identity(),
        )
        self._metrics = store_metrics(registry)
        self._measured: dict[str, int] = {}
        self._block_log = BlockLog()
        self._membership: Membership | None = None
        announce = self._block_log if config.conductor else Unannounced()
        self._service = StoreService(
            config, transfer, segment, self._endpoint, announce, self._changed
        )

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serves until told to stop. Raises ConfigError when the port is taken, or what ended the membership."""
        server = RpcServer(self._config.cluster_token)
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(self._service, server.grpc)
        try:
            address = await server.start(self._config.host, self._config.port)
        except OSError as error:
            raise ConfigError(f"{error}; choose another --port") from error
        self._endpoint = dataclasses.replace(self._endpoint, rpc_address=address)
        self._changed()
        try:
            async with self._member() as membership:
                lifecycle.ready(rpc=address, transfer=self._endpoint.transfer_address)
                await _first_end(asyncio.create_task(lifecycle.stopping.wait()), membership)
        finally:
            await server.stop(STOP_GRACE_S)
            await self._service.close()

    @contextlib.asynccontextmanager
    async def _member(self) -> AsyncIterator[asyncio.Task[None] | None]:
        """Keeps the node registered with its conductor, if it has one; gives the task that does."""
        if self._config.conductor is None:
            yield None
            return
        channels = Channels(self._config.cluster_token)
        registration = conductor_pb2.RegisterRequest(
            endpoint=endpoint_to_wire(self._endpoint), role=common_pb2.ROLE_STORE
        )
        self._membership = Membership(
            channels, self._config.conductor, registration, self._service.load, self._block_log
        )
        task = asyncio.create_task(self._membership.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task})
            await self._membership.leave()
            await channels.close()

    def _changed(self) -> None:
        """The service's state may have changed: measures it and tells the conductor."""
        if self._membership is not None and self._block_log.has_changes:
            self._membership.wake()
        usage, counters = self._service.usage(), self._service.counters
        self._metrics.keys.set(usage.num_objects)
        self._metrics.capacity_bytes.set(usage.capacity)
        self._metrics.allocated_bytes.set(usage.capacity - usage.free)
        for name, metric in (
            ("evictions_attempted", self._metrics.attempted_evictions),
            ("evictions_succeeded", self._metrics.successful_evictions),
            ("integrity_failures", self._metrics.integrity_failures),
        ):
            metric.inc(counters.get(name, 0) - self._measured.get(name, 0))
        self._measured = counters


async def serve(config: StoreConfig, lifecycle: Lifecycle) -> None:
    """Runs a store node until the process is told to stop. Raises ConfigError when it cannot start."""
    registry = CollectorRegistry()
    transfer = TransferEngine(
        cluster_token=config.cluster_token, host=config.host, transports=config.transports
    )
    with transfer, _metrics_endpoint(config, registry):
        lifecycle.progress("allocating memory")
        segment = await asyncio.to_thread(_allocate, transfer, config.dram)
        await StoreNode(config, transfer, segment, registry).run(lifecycle)


def _allocate(transfer: TransferEngine, nbytes: int) -> Segment:
    try:
        return transfer.allocate(nbytes, readable=True)
    except (OSError, MemoryError) as error:
        raise ConfigError(f"--dram {nbytes}: {error}; choose less") from error


async def _first_end(stopping: asyncio.Task[bool], membership: asyncio.Task[None] | None) -> None:
    """Returns when told to stop; raises what ended the membership before that."""
    try:
        tasks = {stopping} if membership is None else {stopping, membership}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if membership is not None and membership.done():
            membership.result()
    finally:
        stopping.cancel()


@contextlib.contextmanager
def _metrics_endpoint(config: StoreConfig, registry: CollectorRegistry) -> Iterator[None]:
    """Prometheus' own exposition server, in its thread."""
    if not config.metrics_port:
        yield
        return
    try:
        server, thread = start_http_server(config.metrics_port, config.host, registry)
    except OSError as error:
        raise ConfigError(f"--metrics-port {config.metrics_port}: {error}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
