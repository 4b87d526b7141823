"""Life of a worker process of either role from start to stop: model, memory, server, membership, drain.

Decides nothing about requests.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import grpc.aio
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from engine.block_pool import BlockPool
from engine.elastic.serving import KvMemoryServicer, show_memory
from engine.pool_figures import pool_collector
from engine.replica import Replica, loaded_replica
from kvstore.client.blocks import BlockStores
from kvstore.home_finder import HomeFinder, finding_home
from protocol.draining import Drain, DrainingServicer
from protocol.ids import Role
from protocol.keys import BlockKey
from protocol.membership import BlockLog, Seat, member, own_endpoint
from protocol.pb import conductor_pb2, worker_pb2_grpc
from protocol.process import Lifecycle
from protocol.rpc import Channels, RpcServer
from protocol.scraping import serve_metrics
from protocol.tracing import Tracer, tracing
from protocol.wire import role_to_wire
from protocol.worker_metrics import registered, worker_collector
from transfer import FaultPlan, Segment, TransferEngine
from transfer.metrics import rail_totals, serving
from worker.config import RoleConfig
from worker.events import MemoryChanged
from worker.memory import KvMemory
from worker.service import WorkerService, WorkerServicer

log = logging.getLogger(__name__)

# The last tokens and failures are sent to gateways within milliseconds.
STOP_GRACE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """Resources that a process has before it takes a role and keeps across role changes."""

    replica: Replica
    transfer: TransferEngine
    segment: Segment  # memory of the block pool
    registry: CollectorRegistry
    tracer: Tracer


@contextlib.asynccontextmanager
async def equipped(
    config: RoleConfig, lifecycle: Lifecycle, name: str, faults: FaultPlan | None = None
) -> AsyncIterator[Equipment]:
    """Provides a process's model, memory, transfer engine and metrics while the block runs. `name`: service name in
    traces. Raises ConfigError if it cannot start."""
    with (
        serving(config, faults) as (transfer, registry),
        tracing(config, config.instance_id, name) as tracer,
    ):
        async with loaded_replica(config, transfer.allocate, lifecycle, num_stages=config.num_stages) as (
            replica,
            segment,
        ):
            show_memory(replica.elasticity, registry)
            yield Equipment(
                replica=replica,
                transfer=transfer,
                segment=segment,
                registry=registry,
                tracer=tracer,
            )


class Worker:
    """One worker on a loaded replica. Each role is a subclass."""

    role: ClassVar[Role]
    service: WorkerService
    watched: Sequence[Any] = ()
    """Futures of the role. The worker ends when one of them is done."""

    def __init__(self, config: RoleConfig, equipment: Equipment, *, earlier: BlockPool | None = None) -> None:
        """`earlier`: pool of the previous worker on this memory, which has ended; its cached blocks are taken over."""
        replica, transfer, segment = equipment.replica, equipment.transfer, equipment.segment
        self.equipment = equipment
        self.channels = Channels(config.cluster_token, config.tls())
        self.stores = BlockStores(self.channels, transfer)
        self.blocks = BlockLog(lambda: self.pool.keys())
        self.memory = KvMemory(segment, replica.plan.own_layout, replica.plan.num_blocks, staging=replica.staging)
        self.pool = BlockPool(
            replica.plan.num_blocks,
            on_added=self.blocks.added,
            on_removed=self._removed,
            eviction=config.prefix_eviction,
            enable_prefix_caching=config.enable_prefix_caching,
            blanks=replica.blanks,
            reserved_share=config.reserved_kv_share,
            zero=replica.zeroing(segment.buffer),
        )
        if earlier is not None:
            self.pool.take_over(earlier)
        self._config = config
        self.service = self._make_service()
        self._elastic = KvMemoryServicer(replica.elasticity, lambda: self.service.post(MemoryChanged()))
        self._drain = Drain(lambda: self.service.is_idle)
        self._home_finder: HomeFinder | None = None
        if config.home_store is not None and config.conductor is not None:
            self._home_finder = HomeFinder(self.channels, config.conductor, config.home_store, self.service.home_found)

    # -- overridden by roles

    def _make_service(self) -> WorkerService:
        raise NotImplementedError

    def _servicer(self) -> WorkerServicer:
        return WorkerServicer(self.service)

    def _add_services(self, server: RpcServer) -> None:
        """Adds the role's gRPC services to those of every worker."""

    def _collectors(self) -> Sequence[Collector]:
        """Returns the role's metrics, in addition to those of every worker."""
        return ()

    def _load(self) -> conductor_pb2.Load:
        return self.service.load()

    def _registration(self, address: str) -> conductor_pb2.RegisterRequest:
        endpoint = own_endpoint(
            self._config.instance_id,
            rpc_address=address,
            transfer_address=self.equipment.transfer.address,
        )
        return self.equipment.replica.registration(endpoint, role_to_wire(self.role))

    # -- from start to stop

    async def run(self, lifecycle: Lifecycle, add_services: Callable[[grpc.aio.Server], None] = lambda _: None) -> None:
        """Serves until asked to stop. `add_services`: adds other services at the same address. Raises ConfigError if
        the port is in use, or the exception of a fatal failure. On return no transfer writes to the pool any more."""
        config, registry = self._config, self.equipment.registry
        server = RpcServer(config.cluster_token, config.tls())
        servicer = self._servicer()
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc)
        server.add_lean("Worker", servicer)
        self._add_services(server)
        worker_pb2_grpc.add_KvMemoryServicer_to_server(self._elastic, server.grpc)
        stats = self.equipment.transfer.stats
        serve_metrics(server.grpc, config.instance_id, registry, lambda: rail_totals(stats))
        worker_pb2_grpc.add_DrainingServicer_to_server(DrainingServicer(self._drain), server.grpc)
        add_services(server.grpc)
        figures = worker_collector(self.role, self.service.status, lambda: self._drain.is_draining)
        blocks = pool_collector(lambda: self.pool)
        try:
            address = await server.start(config.host, config.port)
            with registered(registry, figures, blocks, *self._collectors()):
                await self._be_member(address, lifecycle)
        finally:
            try:
                await self.service.finish()
            finally:
                self.service.streams.finish()
                await server.stop(STOP_GRACE_S)
                await self.service.stop()
                await self.stores.close()
                await self.channels.close()

    async def _be_member(self, address: str, lifecycle: Lifecycle) -> None:
        async with (
            member(self._config, self._registration(address), self._load, self.blocks) as seat,
            finding_home(self._home_finder) as finding,
            self._elastic.coming_and_going(self.pool) as moving,
        ):
            lifecycle.ready(rpc=address, transfer=self.equipment.transfer.address)
            ends = (self.service.failed, *seat.watched, *finding, *moving, *self.watched)
            with self._drain.switched_by(partial(self._set_draining, seat)):
                await lifecycle.until_stopped(*ends)
                await self._end(lifecycle)

    def _set_draining(self, seat: Seat, draining: bool) -> None:
        seat.drain(draining)
        self.service.drain(draining)

    async def _end(self, lifecycle: Lifecycle) -> None:
        """Accepts no new requests and waits until present ones finish, for at most `drain_timeout_s`."""
        self._drain.begin_end()
        if not await lifecycle.drained(self.service.drained(), self._config.drain_timeout_s):
            log.warning("stopping with requests under way")

    def _look_for_home(self) -> None:
        if self._home_finder is not None:
            self._home_finder.look()

    def _removed(self, key: BlockKey) -> None:
        self.blocks.removed(key)
        self.service.state.evicted(key)
