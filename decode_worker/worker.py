"""Assembly of a decode worker's process; the part common to both roles is `worker.process`.

Decides nothing about requests: `decode_worker.state` does, and `decode_worker.service` performs its decisions.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.registry import Collector

from decode_worker.config import DecodeConfig
from decode_worker.keeping import KeepingCosts
from decode_worker.service import DecodeService
from decode_worker.servicers import LandingServicer, LandingZone
from decode_worker.state import DecodeState
from engine.block_pool import BlockPool
from protocol.ids import Role
from protocol.machine import host_identity
from protocol.pb import worker_pb2_grpc
from protocol.process import Lifecycle
from protocol.rpc import RpcServer
from protocol.wire import prefill_profile_from_wire
from protocol.worker_metrics import allocation_histogram
from worker.process import Equipment, Worker, equipped


class DecodeWorker(Worker):
    """A decode worker over a loaded replica."""

    role = Role.DECODE
    service: DecodeService
    service_type: type[DecodeService] = DecodeService

    def __init__(self, config: DecodeConfig, equipment: Equipment, *, earlier: BlockPool | None = None) -> None:
        self._options = config
        self._allocations = allocation_histogram()
        super().__init__(config, equipment, earlier=earlier)

    def _make_state(self) -> DecodeState:
        config, replica = self._options, self.equipment.replica
        limits = config.limits(replica.plan, runs_ahead=config.runs_ahead(replica.device))
        policy = config.policy(replica.profiles)
        return DecodeState(self.pool, limits, policy, self._keeping_costs())

    def _make_service(self) -> DecodeService:
        return self.service_type(
            self._make_state(),
            self.equipment.replica.thread,
            self.equipment.transfer,
            self.memory,
            stores=self.stores,
            look_for_home=self._look_for_home,
            observe_allocation=self._allocations.observe,
            tracer=self.equipment.tracer,
        )

    def _keeping_costs(self) -> KeepingCosts:
        measured, _ = self.equipment.replica.profiles
        return KeepingCosts(
            prefill=prefill_profile_from_wire(measured),
            block_bytes=self.memory.layout.block_bytes,
            host=host_identity(),
            with_answers=self._options.store_writes == "all",
        )

    def _add_services(self, server: RpcServer) -> None:
        replica = self.equipment.replica
        zone = LandingZone(
            transfer_address=self.equipment.transfer.address,
            segment_id=self.equipment.segment.segment_id,
            num_blocks=replica.plan.num_blocks,
            block_size=replica.plan.layout.block_size,
            fingerprint=replica.fingerprint,
        )
        landing = LandingServicer(self.service, zone, replica.thread.prepare)
        worker_pb2_grpc.add_LandingServicer_to_server(landing, server.grpc)
        server.add_lean("Landing", landing)

    def _collectors(self) -> Sequence[Collector]:
        return (self._allocations,)


async def serve(config: DecodeConfig, lifecycle: Lifecycle) -> None:
    """Runs a decode worker until the process is requested to stop. Raises ConfigError if it cannot start."""
    async with equipped(config, lifecycle, "decode") as equipment:
        await DecodeWorker(config, equipment).run(lifecycle)
