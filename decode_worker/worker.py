"""Assembly of a decode worker's process; the part common to both roles is `worker.process`.

Decides nothing about requests: `decode_worker.state` does, and `decode_worker.service` performs its decisions.
"""

from collections.abc import Sequence

from prometheus_client.registry import Collector

from moonserve.decode_worker.config import DecodeConfig
from moonserve.decode_worker.decisions.offloading import OffloadCosts
from moonserve.decode_worker.service import DecodeService, LandingServicer, LandingZone
from moonserve.decode_worker.state import DecodeState
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.protocol.pb import worker_pb2_grpc
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.process.machine import host_identity
from moonserve.protocol.request import Role
from moonserve.protocol.rpc.grpc_transport import RpcServer
from moonserve.worker.metrics import allocation_histogram
from moonserve.worker.process import Worker, WorkerResources, worker_resources


class DecodeWorker(Worker):
    """A decode worker over a loaded replica."""

    role = Role.DECODE
    service: DecodeService
    service_type: type[DecodeService] = DecodeService
    _config: DecodeConfig

    def __init__(self, config: DecodeConfig, equipment: WorkerResources, *, earlier: BlockPool | None = None) -> None:
        self._allocations = allocation_histogram()
        super().__init__(config, equipment, earlier=earlier)

    def _make_state(self) -> DecodeState:
        config, replica = self._config, self.resources.replica
        limits = config.limits(
            replica.plan, runs_ahead=config.runs_ahead(replica.device), speculation=config.speculation(replica)
        )
        policy = config.policy(replica)
        return DecodeState(self.pool, limits, policy, self._offload_costs())

    def _make_service(self) -> DecodeService:
        return self.service_type(
            self._make_state(),
            self.resources.replica.thread,
            self.resources.transfer,
            self.memory,
            stores=self.stores,
            look_for_home=self._request_home_store,
            observe_allocation=self._allocations.observe,
            tracer=self.resources.tracer,
        )

    def _offload_costs(self) -> OffloadCosts:
        prefill, _ = self.resources.replica.step_costs
        return OffloadCosts(
            prefill=prefill,
            block_bytes=self.memory.layout.block_bytes,
            host=host_identity(),
            with_answers=self._config.store_writes == "all",
        )

    def _add_services(self, server: RpcServer) -> None:
        replica = self.resources.replica
        zone = LandingZone(
            transfer_address=self.resources.transfer.address,
            segment_id=self.resources.segment.segment_id,
            num_blocks=replica.plan.num_blocks,
            block_size=replica.plan.layout.block_size,
            fingerprint=replica.fingerprint,
        )
        landing = LandingServicer(self.service, zone, replica.thread.prepare)
        worker_pb2_grpc.add_LandingServicer_to_server(landing, server.grpc)
        server.add_socket_service("Landing", landing)

    def _collectors(self) -> Sequence[Collector]:
        return (self._allocations,)


async def serve(config: DecodeConfig, lifecycle: Lifecycle) -> None:
    """Runs a decode worker until the process is requested to stop. Raises ConfigError if it cannot start."""
    async with worker_resources(config, lifecycle, "decode") as equipment:
        await DecodeWorker(config, equipment).run(lifecycle)
