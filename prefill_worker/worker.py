"""Assembly of a prefill worker's process; the part common to both roles is `worker.process`.

Decides nothing about requests: `prefill_worker.state` does, and `prefill_worker.service` performs its decisions.
"""

import contextlib
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.model.partition import split_into_stages
from moonserve.prefill_worker.config import PrefillConfig
from moonserve.prefill_worker.decisions.load_or_compute import PrefixLoads
from moonserve.prefill_worker.decode_client import DecodeClient
from moonserve.prefill_worker.pipeline_leader import FollowerProcesses, PipelineGroup, start_followers
from moonserve.prefill_worker.service import PrefillService
from moonserve.prefill_worker.state import PrefillState
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.process.metrics import by_label
from moonserve.protocol.request import Role, new_id
from moonserve.transfer.metrics import copy_bytes_per_s, peer_traffic, private_copy_bytes_per_s
from moonserve.worker.process import Worker, WorkerResources, worker_resources

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
        figures = self._loads.read_stats()
        for field, name, text in _COUNTERS:
            counts = {store: getattr(figure, field) for store, figure in figures.items()}
            yield by_label(CounterMetricFamily, name, text, "store", counts)
        text, speeds = "Recent reads.", self._loads.speeds()
        latencies = {store: speed.latency_s for store, speed in speeds.items()}
        yield by_label(GaugeMetricFamily, "moonserve_prefix_load_latency_seconds", text, "store", latencies)
        rates = {store: 1 / speed.s_per_byte for store, speed in speeds.items()}
        yield by_label(GaugeMetricFamily, "moonserve_prefix_load_bytes_per_second", text, "store", rates)


class PrefillWorker(Worker):
    """A prefill worker over a loaded replica. `group` is the pipeline group that it leads; the replica is its first
    stage."""

    role = Role.PREFILL
    takes_submissions = True
    _config: PrefillConfig

    def __init__(
        self,
        config: PrefillConfig,
        equipment: WorkerResources,
        *,
        earlier: BlockPool | None = None,
        group: PipelineGroup | None = None,
    ) -> None:
        self._group = group
        segment = equipment.segment
        self._local_bytes_per_s = (
            copy_bytes_per_s(segment.buffer)
            if equipment.replica.elastic_memory is None
            else private_copy_bytes_per_s(segment.nbytes)
        )
        super().__init__(config, equipment, earlier=earlier)
        if group is not None:
            self.watched = (group.failed,)

    def _make_service(self) -> PrefillService:
        config, replica = self._config, self.resources.replica
        profile, _ = replica.step_costs
        self._state = PrefillState(
            self.pool,
            config.limits(replica.plan),
            lease_prefix=new_id(config.instance_id),
            profile=profile,
            home_store=config.home_store,
        )
        plan, group = replica.plan, self._group
        parts = [] if group is None else split_into_stages(plan.layout.num_layers, plan.stage.size)
        landings = DecodeClient(
            self.channels,
            fingerprint=replica.fingerprint,
            ttl_s=config.landing_ttl_s,
            part_layers=[len(stage.layers) for stage in parts],
        )
        return PrefillService(
            self._state,
            engine=replica.thread,
            memory=self.memory,
            transfer=self.resources.transfer,
            landings=landings,
            stores=self.stores,
            landing_ttl_s=config.landing_ttl_s,
            patience=config.transfer_timeout(),
            look_for_home=self._request_home_store,
            group=group,
            tracer=self.resources.tracer,
        )

    def _collectors(self) -> Sequence[Collector]:
        return (PrefixLoadCollector(self._state.prefix_loads),)

    def _load(self) -> conductor_pb2.Load:
        load = super()._load()
        load.traffic.extend(peer_traffic(self.resources.transfer.stats))
        return load

    def _registration(self, address: str) -> conductor_pb2.RegisterRequest:
        registration = super()._registration(address)
        registration.home_store = self._config.home_store or ""
        registration.local_bytes_per_s = self._local_bytes_per_s
        limits = self._config.limits(self.resources.replica.plan)
        registration.max_num_batched_tokens = limits.max_num_batched_tokens
        return registration


async def serve(config: PrefillConfig, lifecycle: Lifecycle) -> None:
    """Runs a prefill worker until the process is requested to stop. Raises ConfigError if it cannot start."""
    async with contextlib.AsyncExitStack() as stack:
        followers: FollowerProcesses | None = None
        if config.pipeline_parallel_size > 1:  # followers load their layers while this process loads its own
            followers = await stack.enter_async_context(start_followers(config))
        equipment = await stack.enter_async_context(worker_resources(config, lifecycle, "prefill", config.faults()))
        group: PipelineGroup | None = None
        if followers is not None:
            group = await followers.join(equipment.replica, equipment.transfer, equipment.segment)
            await stack.enter_async_context(background_task(followers.watch(group)))
        await PrefillWorker(config, equipment, group=group).run(lifecycle)
