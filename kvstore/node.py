"""A store node from start to stop: memory, listener, membership, metrics. The service itself is `kvstore.service`."""

from __future__ import annotations

import asyncio
import dataclasses

from prometheus_client import CollectorRegistry

from kvstore.config import StoreConfig
from kvstore.service import StoreService
from protocol.errors import ConfigError
from protocol.keys import BlockKey
from protocol.membership import BlockLog, member, own_endpoint
from protocol.metrics import exposed, store_metrics
from protocol.pb import common_pb2, conductor_pb2, kvstore_pb2_grpc
from protocol.process import Lifecycle
from protocol.rpc import RpcServer
from protocol.wire import endpoint_to_wire
from transfer import Segment, TransferEngine
from transfer.metrics import TransferCollector

# Calls under way when the process stops answer within milliseconds, a commit of gigabytes within a second.
STOP_GRACE_S = 1.0


class Unannounced:
    """What a node that belongs to no cluster announces to."""

    def added(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Nobody listens."""

    def removed(self, key: BlockKey) -> None:
        """Nobody listens."""


class StoreNode:
    """One node over an allocated segment."""

    def __init__(
        self,
        config: StoreConfig,
        transfer: TransferEngine,
        segment: Segment,
        registry: CollectorRegistry,
    ) -> None:
        self._config = config
        self._endpoint = own_endpoint(
            config.instance_id,
            rpc_address="",  # known once it listens
            transfer_address=transfer.address,
        )
        self._metrics = store_metrics(registry)
        self._measured: dict[str, int] = {}
        self._block_log = BlockLog()
        announce = self._block_log if config.conductor else Unannounced()
        self._service = StoreService(
            config, transfer, segment, self._endpoint, announce, self._measure
        )

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serves until told to stop. Raises ConfigError when the port is taken, or what ended the membership."""
        server = RpcServer(self._config.cluster_token)
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(self._service, server.grpc)
        address = await server.start(self._config.host, self._config.port)
        self._measure()
        try:
            registration = self._registration(address)
            load, block_log = self._service.load, self._block_log
            async with member(self._config, registration, load, block_log) as seat:
                lifecycle.ready(rpc=address, transfer=self._endpoint.transfer_address)
                await lifecycle.until_stopped(*seat.watched)
        finally:
            await server.stop(STOP_GRACE_S)
            await self._service.close()

    def _registration(self, address: str) -> conductor_pb2.RegisterRequest:
        endpoint = dataclasses.replace(self._endpoint, rpc_address=address)
        return conductor_pb2.RegisterRequest(
            endpoint=endpoint_to_wire(endpoint), role=common_pb2.ROLE_STORE
        )

    def _measure(self) -> None:
        """The service's state may have changed."""
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
        cluster_token=config.cluster_token,
        name=config.instance_id,
        options=config.transfer_options(config.host),
    )
    registry.register(TransferCollector(transfer))
    with transfer, exposed(registry, config.host, config.metrics_port):
        lifecycle.progress("allocating memory")
        segment = await asyncio.to_thread(_allocate, transfer, config.dram)
        await StoreNode(config, transfer, segment, registry).run(lifecycle)


def _allocate(transfer: TransferEngine, nbytes: int) -> Segment:
    try:
        return transfer.allocate(nbytes, readable=True)
    except (OSError, MemoryError) as error:
        raise ConfigError(f"--dram {nbytes}: {error}; choose less") from error
