"""A decode worker from start to stop: model, memory, listener, membership, drain.

Decides nothing about requests; that is `decode_worker.state`, and `decode_worker.service` runs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import grpc.aio
from prometheus_client import CollectorRegistry

from decode_worker import events
from decode_worker.config import DecodeConfig
from decode_worker.keeping import KeepingCosts
from decode_worker.service import DecodeService
from decode_worker.servicers import LandingServicer, LandingZone, WorkerServicer
from decode_worker.state import DecodeState
from engine.block_pool import BlockPool
from engine.elastic.serving import MemoryAtWork, show_memory
from engine.replica import Replica, loaded_replica
from kvstore.block_client import BlockClient
from kvstore.home_finder import HomeFinder, finding_home
from protocol.draining import Drain, DrainingServicer
from protocol.ids import Role
from protocol.keys import BlockKey
from protocol.membership import BlockLog, Seat, member, own_endpoint
from protocol.pb import common_pb2, conductor_pb2, worker_pb2_grpc
from protocol.process import Lifecycle, host_identity
from protocol.rpc import Channels, RpcServer
from protocol.scraping import serve_metrics
from protocol.tracing import Tracer, tracing
from protocol.wire import prefill_profile_from_wire
from protocol.worker_metrics import allocation_histogram, registered, worker_collector
from transfer import Segment, TransferEngine, told
from transfer.serving import serving

log = logging.getLogger(__name__)

# The last tokens and failures are on their way to gateways within milliseconds.
STOP_GRACE_S = 0.5


class DecodeWorker:
    """One worker over a loaded replica."""

    def __init__(
        self,
        config: DecodeConfig,
        replica: Replica,
        transfer: TransferEngine,
        segment: Segment,
        registry: CollectorRegistry,
        *,
        earlier: BlockPool | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`earlier`: the pool of who had this memory before and has ended."""
        plan = replica.plan
        self._config = config
        self._registry = registry
        self._stats = transfer.stats
        self._allocations = allocation_histogram()
        self._tracer = tracer
        self._replica = replica
        self._channels = Channels(config.cluster_token, config.tls())
        self._stores = BlockClient(self._channels, transfer)
        self._blocks = BlockLog(lambda: self.pool.keys())
        self._zone = LandingZone(
            transfer_address=transfer.address,
            segment_id=segment.segment_id,
            num_blocks=plan.num_blocks,
            block_size=plan.layout.block_size,
            fingerprint=replica.fingerprint,
        )
        self.pool = BlockPool(
            plan.num_blocks,
            on_added=self._blocks.added,
            on_removed=self._removed,
            eviction=config.prefix_eviction,
            enable_prefix_caching=config.enable_prefix_caching,
            blanks=replica.blanks,
        )
        if earlier is not None:
            self.pool.take_over(earlier)
        self.service = self._make_service(transfer, segment)
        self._drain = Drain(lambda: self.service.idle.is_set())
        self._memory = MemoryAtWork(
            replica.elasticity, self.pool, lambda: self.service.handle(events.MemoryChanged())
        )
        self._home_finder: HomeFinder | None = None
        if config.home_store is not None and config.conductor is not None:
            self._home_finder = HomeFinder(
                self._channels, config.conductor, config.home_store, self.service.home_found
            )

    def _make_service(self, transfer: TransferEngine, segment: Segment) -> DecodeService:
        replica, plan = self._replica, self._replica.plan
        policy = self._config.policy(replica.profiles)
        limits = self._config.limits(plan, runs_ahead=self._config.runs_ahead(replica.device))
        state = DecodeState(self.pool, limits, policy, self._keeping_costs())
        return DecodeService(
            state,
            replica.thread,
            transfer,
            segment,
            plan.layout,
            stores=self._stores,
            staging=replica.staging,
            look_for_home=self._look_for_home,
            observe_allocation=self._allocations.observe,
            tracer=self._tracer,
        )

    def _keeping_costs(self) -> KeepingCosts:
        measured, _ = self._replica.profiles
        return KeepingCosts(
            prefill=prefill_profile_from_wire(measured),
            block_bytes=self._replica.plan.layout.block_bytes,
            host=host_identity(),
            with_answers=self._config.store_writes == "all",
        )

    def _look_for_home(self) -> None:
        if self._home_finder is not None:
            self._home_finder.look()

    def _make_servicer(self) -> worker_pb2_grpc.WorkerServicer:
        return WorkerServicer(self.service)

    def _removed(self, key: BlockKey) -> None:
        self._blocks.removed(key)

    async def run(
        self, lifecycle: Lifecycle, add_services: Callable[[grpc.aio.Server], None] = lambda _: None
    ) -> None:
        """Serves until told to stop; `add_services`: others at the same address. Raises ConfigError when the port is
        taken, or what ended the membership. All windows on the pool are closed when it returns or raises."""
        server = RpcServer(self._config.cluster_token, self._config.tls())
        figures = worker_collector(
            Role.DECODE, self.service.status, lambda: self._drain.is_draining
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self._make_servicer(), server.grpc)
        landing = LandingServicer(self.service, self._zone, self._replica.thread.prepare)
        worker_pb2_grpc.add_LandingServicer_to_server(landing, server.grpc)
        worker_pb2_grpc.add_KvMemoryServicer_to_server(self._memory.servicer, server.grpc)
        serve_metrics(
            server.grpc,
            self._config.instance_id,
            self._registry,
            lambda: told.rails(self._stats),
        )
        worker_pb2_grpc.add_DrainingServicer_to_server(DrainingServicer(self._drain), server.grpc)
        add_services(server.grpc)
        ended = asyncio.Event()
        work = asyncio.create_task(self.service.run(ended))
        try:
            address = await server.start(self._config.host, self._config.port)
            registration = self._registration(address)
            with registered(self._registry, figures, self._allocations):
                async with (
                    member(self._config, registration, self.service.load, self._blocks) as seat,
                    finding_home(self._home_finder) as finding,
                    self._memory.coming_and_going() as moving,
                ):
                    switch = partial(self._set_draining, seat)
                    lifecycle.ready(rpc=address, transfer=self._zone.transfer_address)
                    with self._drain.switched_by(switch):
                        await lifecycle.until_stopped(work, *seat.watched, *finding, *moving)
                        await self._end(lifecycle)
        finally:
            ended.set()
            await asyncio.wait({work})
            self.service.streams.finish()
            await server.stop(STOP_GRACE_S)
            self.service.streams.close()
            await self._stores.close()
            await self._channels.close()
        work.result()

    def _set_draining(self, seat: Seat, draining: bool) -> None:
        seat.drain(draining)
        self.service.handle(events.DrainStarted() if draining else events.DrainEnded())

    async def _end(self, lifecycle: Lifecycle) -> None:
        """Takes nothing new and lets what runs finish, for as long as the configuration allows."""
        self._drain.begin_end()
        if not await lifecycle.drained(self.service.idle.wait(), self._config.drain_timeout_s):
            log.warning("stopping with requests under way")

    def _registration(self, address: str) -> conductor_pb2.RegisterRequest:
        endpoint = own_endpoint(
            self._config.instance_id,
            rpc_address=address,
            transfer_address=self._zone.transfer_address,
        )
        return self._replica.registration(endpoint, common_pb2.ROLE_DECODE)


async def serve(config: DecodeConfig, lifecycle: Lifecycle) -> None:
    """Runs a decode worker until the process is told to stop. Raises ConfigError when it cannot start."""
    with (
        serving(config) as (transfer, registry),
        tracing(config, config.instance_id, "decode") as tracer,
    ):
        async with loaded_replica(config, transfer.allocate, lifecycle) as (replica, segment):
            show_memory(replica.elasticity, registry)
            await DecodeWorker(config, replica, transfer, segment, registry, tracer=tracer).run(
                lifecycle
            )
