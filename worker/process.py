"""Life of a worker process of either role from start to stop: model, memory, server, membership, drain.

Also has the options of both roles and the KV pool as bytes. Decides nothing about requests.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import grpc.aio
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from moonserve.engine.config import ReplicaConfig
from moonserve.engine.cuda.staging import InPlace, Staging
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.kv_cache.elastic_service import ElasticMemoryCollector, KvMemoryServicer
from moonserve.engine.kv_cache.pool_metrics import pool_collector
from moonserve.engine.replica import Replica, running_replica
from moonserve.kvstore.client.blocks import BlockStores
from moonserve.kvstore.client.node_access.buffers import BufferSlots, slots_of_blocks
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import BlockKey, KvLayout
from moonserve.protocol.membership.heartbeats import BlockLog, MembershipHandle, conductor_membership, own_endpoint
from moonserve.protocol.pb import conductor_pb2, worker_pb2_grpc
from moonserve.protocol.process.config import option
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.process.metrics import add_metrics_service
from moonserve.protocol.process.tracing import Tracer, tracing
from moonserve.protocol.request import BlockId, Role
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from moonserve.protocol.rpc.wire import role_to_wire
from moonserve.transfer import FaultPlan, Segment, TransferEngine
from moonserve.transfer.config import TransferConfig
from moonserve.transfer.metrics import engine_with_metrics, rail_totals
from moonserve.worker.draining import Drain, DrainingServicer
from moonserve.worker.events import MemoryChanged
from moonserve.worker.home_finder import HomeFinder, finding_home
from moonserve.worker.metrics import registered_collectors, worker_collector
from moonserve.worker.service import PoolService, PrefillServicer, WorkerServicer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RoleConfig(ReplicaConfig, TransferConfig):
    """Options of a worker of either role."""

    home_store: str | None = option(
        None,
        help="instance id of the store node for this worker's blocks: those of prompts, those of answers, and those of "
        "preempted sequences where reading them is cheaper than computing them again",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.home_store is not None and self.conductor is None:
            raise ConfigError("--home-store needs --conductor, which knows the store's address")


@dataclass(frozen=True, slots=True)
class KvMemory:
    """A worker's KV pool as bytes: its registered segment, in the layout of `protocol.kv_blocks`."""

    segment: Segment
    layout: KvLayout
    num_blocks: int
    first_piece: int = 0
    """Index of the pool's first piece among the target's pieces; above 0 for a later pipeline stage."""
    staging: Staging = field(default_factory=InPlace)
    """Copies between the segment and the memory that the engine computes from."""

    @property
    def piece_stride(self) -> int:
        """Bytes from one piece of a block to its next piece."""
        return self.num_blocks * self.layout.piece_bytes

    def spots_of(self, blocks: Sequence[BlockId]) -> BufferSlots:
        """Returns all pieces of each block, in the order of a stored object."""
        return slots_of_blocks(self.segment, self.layout, self.num_blocks, blocks)


# The last tokens and failures are sent to gateways within milliseconds.
STOP_GRACE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResources:
    """Resources that a process has before it takes a role and keeps across role changes."""

    replica: Replica
    transfer: TransferEngine
    segment: Segment  # memory of the block pool
    registry: CollectorRegistry
    tracer: Tracer


@contextlib.asynccontextmanager
async def worker_resources(
    config: RoleConfig, lifecycle: Lifecycle, name: str, faults: FaultPlan | None = None
) -> AsyncIterator[WorkerResources]:
    """Provides a process's model, memory, transfer engine and metrics while the block runs. `name`: service name in
    traces. Raises ConfigError if it cannot start."""
    with (
        engine_with_metrics(config, faults) as (transfer, registry),
        tracing(config, config.instance_id, name) as tracer,
    ):
        async with running_replica(config, transfer.allocate, lifecycle, num_stages=config.num_stages) as (
            replica,
            segment,
        ):
            if replica.elastic_memory is not None:
                registry.register(ElasticMemoryCollector(replica.elastic_memory))
            yield WorkerResources(
                replica=replica,
                transfer=transfer,
                segment=segment,
                registry=registry,
                tracer=tracer,
            )


class Worker:
    """One worker on a loaded replica. Each role is a subclass."""

    role: ClassVar[Role]
    takes_submissions: ClassVar[bool] = False
    """True if gateways submit requests to this worker, because it computes prompts."""
    service: PoolService
    watched: Sequence[Any] = ()
    """Futures of the role. The worker ends when one of them is done."""

    def __init__(self, config: RoleConfig, equipment: WorkerResources, *, earlier: BlockPool | None = None) -> None:
        """`earlier`: pool of the previous worker on this memory, which has ended; its cached blocks are taken over."""
        replica, transfer, segment = equipment.replica, equipment.transfer, equipment.segment
        self.resources = equipment
        self.channels = Channels(config.cluster_token, config.tls())
        self.stores = BlockStores(self.channels, transfer)
        self.blocks = BlockLog(lambda: self.pool.keys())
        self.memory = KvMemory(segment, replica.plan.own_layout, replica.plan.num_blocks, staging=replica.staging)
        self.pool = BlockPool(
            replica.plan.num_blocks,
            on_added=self.blocks.added,
            on_removed=self._on_block_removed,
            eviction=config.prefix_eviction,
            enable_prefix_caching=config.enable_prefix_caching,
            free_list=replica.free_list,
            reserved_share=config.reserved_kv_share,
            zero=replica.make_block_zeroer(segment.buffer),
        )
        if earlier is not None:
            self.pool.adopt_cache(earlier)
        self._config = config
        self.service = self._make_service()
        self._elastic = KvMemoryServicer(replica.elastic_memory, lambda: self.service.post(MemoryChanged()))
        self._drain = Drain(lambda: self.service.is_idle)
        self._home_finder: HomeFinder | None = None
        if config.home_store is not None and config.conductor is not None:
            self._home_finder = HomeFinder(self.channels, config.conductor, config.home_store, self.service.home_found)

    # -- overridden by roles

    def _make_service(self) -> PoolService:
        raise NotImplementedError

    def _servicer(self) -> WorkerServicer:
        if not self.takes_submissions:
            return WorkerServicer(self.service)
        replica = self.resources.replica
        block_size, prepare = replica.plan.layout.block_size, replica.thread.prepare
        return PrefillServicer(self.service, block_size=block_size, vocab_size=replica.vocab_size, prepare=prepare)

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
            transfer_address=self.resources.transfer.address,
        )
        return self.resources.replica.registration(endpoint, role_to_wire(self.role))

    # -- from start to stop

    async def run(self, lifecycle: Lifecycle, add_services: Callable[[grpc.aio.Server], None] = lambda _: None) -> None:
        """Serves until asked to stop. `add_services`: adds other services at the same address. Raises ConfigError if
        the port is in use, or the exception of a fatal failure. On return no transfer writes to the pool any more."""
        config, registry = self._config, self.resources.registry
        server = RpcServer(config.cluster_token, config.tls())
        servicer = self._servicer()
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc)
        server.add_socket_service("Worker", servicer)
        self._add_services(server)
        worker_pb2_grpc.add_KvMemoryServicer_to_server(self._elastic, server.grpc)
        stats = self.resources.transfer.stats
        add_metrics_service(server.grpc, config.instance_id, registry, lambda: rail_totals(stats))
        worker_pb2_grpc.add_DrainingServicer_to_server(DrainingServicer(self._drain), server.grpc)
        add_services(server.grpc)
        figures = worker_collector(self.role, self.service.status, lambda: self._drain.is_draining)
        blocks = pool_collector(lambda: self.pool)
        try:
            address = await server.start(config.host, config.port)
            with registered_collectors(registry, figures, blocks, *self._collectors()):
                await self._serve_as_member(address, lifecycle)
        finally:
            try:
                await self.service.finish()
            finally:
                self.service.streams.finish()
                await server.stop(STOP_GRACE_S)
                await self.service.stop()
                await self.stores.close()
                await self.channels.close()

    async def _serve_as_member(self, address: str, lifecycle: Lifecycle) -> None:
        async with (
            conductor_membership(self._config, self._registration(address), self._load, self.blocks) as membership,
            finding_home(self._home_finder) as finding,
            self._elastic.running_page_management(self.pool) as moving,
        ):
            lifecycle.ready(rpc=address, transfer=self.resources.transfer.address)
            ends = (self.service.failed, *membership.watched, *finding, *moving, *self.watched)
            with self._drain.commands_enabled(partial(self._set_draining, membership)):
                await lifecycle.wait_for_stop(*ends)
                await self._end(lifecycle)

    def _set_draining(self, membership: MembershipHandle, draining: bool) -> None:
        membership.drain(draining)
        self.service.drain(draining)

    async def _end(self, lifecycle: Lifecycle) -> None:
        """Accepts no new requests and waits until present ones finish, for at most `drain_timeout_s`."""
        self._drain.start_shutdown()
        if not await lifecycle.wait_until_drained(self.service.drained(), self._config.drain_timeout_s):
            log.warning("stopping while requests are in flight")

    def _request_home_store(self) -> None:
        if self._home_finder is not None:
            self._home_finder.look()

    def _on_block_removed(self, key: BlockKey) -> None:
        self.blocks.removed(key)
        self.service.state.on_evicted(key)
