"""Assembly of a prefill worker's process; the part common to both roles is `worker.process`.

Decides nothing about requests: `prefill_worker.state` does, and `prefill_worker.service` performs its decisions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.block_pool import BlockPool
from engine.parts import split
from prefill_worker.config import PrefillConfig
from prefill_worker.landing_client import LandingClient
from prefill_worker.load_or_compute import PrefixLoads
from prefill_worker.pipeline.group import FollowerProcesses, Group, followers_of
from prefill_worker.service import PrefillService
from prefill_worker.servicer import PrefillServicer
from prefill_worker.state import PrefillState
from protocol.ids import Role, new_id
from protocol.pb import conductor_pb2
from protocol.process import Lifecycle, running
from protocol.wire import prefill_profile_from_wire
from transfer.metrics import local_bytes_per_s, local_bytes_per_s_beside, peer_traffic
from worker.process import Equipment, Worker, equipped

_COUNTERS = (
    ("reads", "moonserve_prefix_load_reads", "Runs of prefix blocks read, or tried."),
    ("failures", "moonserve_prefix_load_failures", "Of them, those that failed."),
    ("skipped", "moonserve_prefix_load_skipped", "Runs computed since reading looked slower."),
    ("num_bytes", "moonserve_prefix_load_bytes", "Bytes of prefix read."),
    ("seconds", "moonserve_prefix_load_seconds", "Time that reads took, failed ones too."),
    ("predicted_s", "moonserve_prefix_load_predicted_seconds", "Time predicted for these reads."),
)


class PrefixLoadCollector(Collector):
    """Prometheus metrics per store: reads, predicted and actual times, and the measured speed."""

    def __init__(self, loads: PrefixLoads) -> None:
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        figures = self._loads.figures()
        for field, name, text in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=("store",))
            for store, figure in figures.items():
                family.add_metric((store,), getattr(figure, field))
            yield family
        latency = GaugeMetricFamily("moonserve_prefix_load_latency_seconds", "Recent reads.", labels=("store",))
        rate = GaugeMetricFamily("moonserve_prefix_load_bytes_per_second", "Recent reads.", labels=("store",))
        for store, speed in self._loads.speeds().items():
            latency.add_metric((store,), speed.latency_s)
            rate.add_metric((store,), 1 / speed.s_per_byte)
        yield latency
        yield rate


class PrefillWorker(Worker):
    """A prefill worker over a loaded replica. `group` is the pipeline group that it leads; the replica is its first
    stage."""

    role = Role.PREFILL

    def __init__(
        self,
        config: PrefillConfig,
        equipment: Equipment,
        *,
        earlier: BlockPool | None = None,
        group: Group | None = None,
    ) -> None:
        self._options = config
        self._group = group
        segment = equipment.segment
        self._local_bytes_per_s = (
            local_bytes_per_s(segment.buffer)
            if equipment.replica.elasticity is None
            else local_bytes_per_s_beside(segment.nbytes)
        )
        super().__init__(config, equipment, earlier=earlier)
        if group is not None:
            self.watched = (group.failed,)

    def _make_service(self) -> PrefillService:
        config, replica = self._options, self.equipment.replica
        measured, _ = replica.profiles
        self._state = PrefillState(
            self.pool,
            config.limits(replica.plan),
            lease_prefix=new_id(config.instance_id),
            profile=prefill_profile_from_wire(measured),
            home_store=config.home_store,
        )
        plan, group = replica.plan, self._group
        parts = [] if group is None else split(plan.layout.num_layers, plan.stage.size)
        landings = LandingClient(
            self.channels,
            fingerprint=replica.fingerprint,
            ttl_s=config.landing_ttl_s,
            part_layers=[len(stage.layers) for stage in parts],
        )
        return PrefillService(
            self._state,
            engine=replica.thread,
            memory=self.memory,
            transfer=self.equipment.transfer,
            landings=landings,
            stores=self.stores,
            landing_ttl_s=config.landing_ttl_s,
            patience=config.transfer_patience(),
            look_for_home=self._look_for_home,
            group=group,
            tracer=self.equipment.tracer,
        )

    def _servicer(self) -> PrefillServicer:
        replica = self.equipment.replica
        return PrefillServicer(
            self.service,
            block_size=replica.plan.layout.block_size,
            vocab_size=replica.vocab_size,
            prepare=replica.thread.prepare,
        )

    def _collectors(self) -> Sequence[Collector]:
        return (PrefixLoadCollector(self._state.prefix_loads),)

    def _load(self) -> conductor_pb2.Load:
        load = super()._load()
        load.traffic.extend(peer_traffic(self.equipment.transfer.stats))
        return load

    def _registration(self, address: str) -> conductor_pb2.RegisterRequest:
        registration = super()._registration(address)
        registration.home_store = self._options.home_store or ""
        registration.local_bytes_per_s = self._local_bytes_per_s
        limits = self._options.limits(self.equipment.replica.plan)
        registration.max_num_batched_tokens = limits.max_num_batched_tokens
        return registration


async def serve(config: PrefillConfig, lifecycle: Lifecycle) -> None:
    """Runs a prefill worker until the process is requested to stop. Raises ConfigError if it cannot start."""
    async with contextlib.AsyncExitStack() as stack:
        followers: FollowerProcesses | None = None
        if config.pipeline_parallel_size > 1:  # followers load their layers while this process loads its own
            followers = await stack.enter_async_context(followers_of(config))
        equipment = await stack.enter_async_context(equipped(config, lifecycle, "prefill", config.faults()))
        group: Group | None = None
        if followers is not None:
            group = await followers.join(equipment.replica, equipment.transfer, equipment.segment)
            await stack.enter_async_context(running(followers.watch(group)))
        await PrefillWorker(config, equipment, group=group).run(lifecycle)
