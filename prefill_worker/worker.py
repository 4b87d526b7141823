"""A prefill worker from start to stop: model, memory, listener, membership, drain.

Decides nothing about requests; that is `prefill_worker.state`, and `prefill_worker.service` runs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import grpc.aio
from prometheus_client import CollectorRegistry

from engine.block_pool import BlockPool
from engine.elastic.serving import MemoryAtWork, show_memory
from engine.pool_plan import PoolPlan
from engine.replica import Replica, loaded_replica
from engine.stage import split
from kvstore.block_client import BlockClient
from kvstore.home_finder import HomeFinder, finding_home
from prefill_worker import events as ev
from prefill_worker.config import PrefillConfig
from prefill_worker.landing import KvMemory
from prefill_worker.landing_client import LandingClient
from prefill_worker.metrics import PrefixLoadCollector
from prefill_worker.pipeline.group import Group
from prefill_worker.pipeline.processes import followers_of
from prefill_worker.service import PrefillService
from prefill_worker.servicer import WorkerServicer
from prefill_worker.state import PrefillState
from protocol.draining import Drain, DrainingServicer
from protocol.ids import Role, new_id
from protocol.membership import BlockLog, Seat, member, own_endpoint
from protocol.pb import common_pb2, conductor_pb2, worker_pb2_grpc
from protocol.process import Lifecycle, running
from protocol.rpc import Channels, RpcServer
from protocol.scraping import serve_metrics
from protocol.tracing import Tracer, tracing
from protocol.wire import prefill_profile_from_wire
from protocol.worker_metrics import registered, worker_collector
from transfer import Segment, TransferEngine, told
from transfer.serving import serving

log = logging.getLogger(__name__)

# The last tokens and failures are on their way to gateways within milliseconds.
STOP_GRACE_S = 0.5


class PrefillWorker:
    """One worker over a loaded replica."""

    def __init__(
        self,
        config: PrefillConfig,
        replica: Replica,
        transfer: TransferEngine,
        segment: Segment,
        registry: CollectorRegistry,
        *,
        earlier: BlockPool | None = None,
        group: Group | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`earlier`: the pool of who had this memory before and has ended. `group`: whom this worker leads; the replica
        is its first stage then."""
        self._config = config
        self._replica = replica
        self._transfer_address = transfer.address
        self._stats = transfer.stats
        self._local_bytes_per_s = (
            told.local_bytes_per_s(segment.buffer)
            if replica.elasticity is None
            else told.local_bytes_per_s_beside(segment.nbytes)
        )
        self._channels = Channels(config.cluster_token, config.tls())
        self._blocks = BlockLog(lambda: self.pool.keys())
        state = self._make_state()
        self.pool = state.pool
        if earlier is not None:
            self.pool.take_over(earlier)
        self._registry = registry
        self._prefix_loads = PrefixLoadCollector(state.prefix_loads)
        self._group = group
        self._tracer = tracer
        self.service = self._make_service(state, transfer, segment)
        self._memory = MemoryAtWork(
            replica.elasticity, self.pool, lambda: self.service.post(ev.MemoryChanged())
        )
        self._home_finder = self._make_home_finder()
        self._drain = Drain(lambda: self.service.is_idle)
        self._servicer = WorkerServicer(
            self.service,
            block_size=replica.plan.layout.block_size,
            vocab_size=replica.vocab_size,
            prepare=replica.thread.prepare,
        )

    async def run(
        self, lifecycle: Lifecycle, add_services: Callable[[grpc.aio.Server], None] = lambda _: None
    ) -> None:
        """Serves until told to stop; `add_services`: others at the same address. Raises ConfigError when the port is
        taken, or what made going on pointless. No transfer writes to the pool any more when it returns or raises."""
        server = RpcServer(self._config.cluster_token, self._config.tls())
        worker_pb2_grpc.add_WorkerServicer_to_server(self._servicer, server.grpc)
        worker_pb2_grpc.add_KvMemoryServicer_to_server(self._memory.servicer, server.grpc)
        serve_metrics(
            server.grpc,
            self._config.instance_id,
            self._registry,
            lambda: told.rails(self._stats),
        )
        worker_pb2_grpc.add_DrainingServicer_to_server(DrainingServicer(self._drain), server.grpc)
        add_services(server.grpc)
        figures = worker_collector(
            Role.PREFILL, self.service.status, lambda: self._servicer.draining
        )
        try:
            address = await server.start(self._config.host, self._config.port)
            registration = self._registration(address)
            with registered(self._registry, self._prefix_loads, figures):
                await self._be_member(registration, lifecycle, address)
        finally:
            self.service.streams.finish()
            await server.stop(STOP_GRACE_S)
            await self.service.stop()
            await self._channels.close()

    async def _be_member(
        self, registration: conductor_pb2.RegisterRequest, lifecycle: Lifecycle, address: str
    ) -> None:
        async with (
            member(self._config, registration, self._load, self._blocks) as seat,
            finding_home(self._home_finder) as finding,
            self._memory.coming_and_going() as moving,
        ):
            lifecycle.ready(rpc=address, transfer=self._transfer_address)
            of_group = (self._group.failed,) if self._group is not None else ()
            watched = (self.service.failed, *seat.watched, *finding, *moving, *of_group)
            with self._drain.switched_by(partial(self._set_draining, seat)):
                await lifecycle.until_stopped(*watched)
                await self._end(lifecycle)

    def _set_draining(self, seat: Seat, draining: bool) -> None:
        self._servicer.draining = draining
        seat.drain(draining)

    async def _end(self, lifecycle: Lifecycle) -> None:
        """Takes nothing new and lets what is here finish, for as long as the configuration allows."""
        self._drain.begin_end()
        if not await lifecycle.drained(self.service.drained(), self._config.drain_timeout_s):
            log.warning("stopping with requests under way")

    def _make_state(self) -> PrefillState:
        measured, _ = self._replica.profiles
        return PrefillState(
            self._config.limits(self._replica.plan),
            lease_prefix=new_id(self._config.instance_id),
            profile=prefill_profile_from_wire(measured),
            home_store=self._config.home_store,
            on_added=self._blocks.added,
            on_removed=self._blocks.removed,
            blanks=self._replica.blanks,
        )

    def _make_service(
        self, state: PrefillState, transfer: TransferEngine, segment: Segment
    ) -> PrefillService:
        config, plan = self._config, self._replica.plan
        landings = LandingClient(
            self._channels,
            fingerprint=self._replica.fingerprint,
            ttl_s=config.landing_ttl_s,
            part_layers=_part_layers(plan) if self._group is not None else (),
        )
        return PrefillService(
            state,
            engine=self._replica.thread,
            memory=KvMemory(
                segment, plan.own_layout, plan.num_blocks, staging=self._replica.staging
            ),
            transfer=transfer,
            landings=landings,
            stores=BlockClient(self._channels, transfer),
            landing_ttl_s=config.landing_ttl_s,
            patience=config.transfer_patience(),
            look_for_home=self._look_for_home,
            group=self._group,
            tracer=self._tracer,
        )

    def _make_home_finder(self) -> HomeFinder | None:
        home_store, conductor = self._config.home_store, self._config.conductor
        if home_store is None or conductor is None:
            return None
        return HomeFinder(self._channels, conductor, home_store, self.service.home_found)

    def _look_for_home(self) -> None:
        if self._home_finder is not None:
            self._home_finder.look()

    def _load(self) -> conductor_pb2.Load:
        load = self.service.load()
        load.traffic.extend(told.traffic(self._stats))
        return load

    def _registration(self, address: str) -> conductor_pb2.RegisterRequest:
        endpoint = own_endpoint(
            self._config.instance_id,
            rpc_address=address,
            transfer_address=self._transfer_address,
        )
        registration = self._replica.registration(endpoint, common_pb2.ROLE_PREFILL)
        registration.home_store = self._config.home_store or ""
        registration.local_bytes_per_s = self._local_bytes_per_s
        limits = self._config.limits(self._replica.plan)
        registration.max_num_batched_tokens = limits.max_num_batched_tokens
        return registration


async def serve(config: PrefillConfig, lifecycle: Lifecycle) -> None:
    """Runs a prefill worker until the process is told to stop. Raises ConfigError when it cannot start."""
    with (
        serving(config, config.faults()) as (transfer, registry),
        tracing(config, config.instance_id, "prefill") as tracer,
    ):
        if config.pipeline_parallel_size > 1:
            await _lead(config, transfer, registry, tracer, lifecycle)
            return
        async with loaded_replica(config, transfer.allocate, lifecycle) as (replica, segment):
            show_memory(replica.elasticity, registry)
            await PrefillWorker(config, replica, transfer, segment, registry, tracer=tracer).run(
                lifecycle
            )


async def _lead(
    config: PrefillConfig,
    transfer: TransferEngine,
    registry: CollectorRegistry,
    tracer: Tracer,
    lifecycle: Lifecycle,
) -> None:
    """As the first stage of a group, whose others run and end with this process."""
    num_stages = config.pipeline_parallel_size
    async with (
        followers_of(config) as followers,
        loaded_replica(config, transfer.allocate, lifecycle, num_stages=num_stages) as (
            replica,
            segment,
        ),
    ):
        group = await followers.join(replica, transfer, segment)
        worker = PrefillWorker(
            config, replica, transfer, segment, registry, group=group, tracer=tracer
        )
        async with running(followers.watch(group)):
            await worker.run(lifecycle)


def _part_layers(plan: PoolPlan) -> list[int]:
    """Layers of each stage."""
    return [len(stage.layers) for stage in split(plan.layout.num_layers, plan.stage.size)]
