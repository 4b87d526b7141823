"""The conductor of a simulated cluster."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from conductor.events import Heartbeat, Tick
from conductor.limits import Limits as ConductorLimits
from conductor.policies import make_policy
from conductor.service import ConductorService
from conductor.state import ConductorState
from protocol.metrics import SchedulerMetrics
from protocol.pb import conductor_pb2_grpc
from tests.simulation.processes.process import Process

SCHEDULER_METRICS = SchedulerMetrics(CollectorRegistry())


class Conductor(Process):
    """Alone in its cluster; it forgets everything when it dies."""

    async def start(self) -> None:
        terms = self.world.terms
        limits = ConductorLimits(ttft_slo_s=1e6, tbt_slo_s=1e6, placement_ttl_s=60.0, num_decisions=64)
        policy = make_policy(terms.policy, 1.5, terms.seed)
        # Its books are many arrays: proving them after each heartbeat would take most of the time.
        self.state = self.checked(ConductorState(policy, limits), seldom=(Heartbeat, Tick))
        self.service = ConductorService(self.state, SCHEDULER_METRICS, self.life.clock, away_after_s=limits.lease_s / 2)
        conductor_pb2_grpc.add_ConductorServicer_to_server(self.service, self.server)

    async def serve(self) -> None:
        await self.service.housekeep(1.0)

    def validate(self) -> None:
        self.state.validate()
