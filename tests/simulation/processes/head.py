"""Conductor and gateways of a simulated cluster."""

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry

from moonserve.conductor.events import Heartbeat, Tick
from moonserve.conductor.peers.leader_election_service import tick_periodically
from moonserve.conductor.placement.admission import Limits
from moonserve.conductor.placement.policies import make_policy
from moonserve.conductor.service import ConductorMetrics, ConductorService
from moonserve.conductor.state import ConductorState
from moonserve.gateway.cluster.request_metrics import RequestMetrics
from moonserve.gateway.config import GatewayConfig
from moonserve.gateway.generation.request_timing import PHASES
from moonserve.gateway.generation.service import Gateway
from moonserve.gateway.text.detokenizer import ByteDecoder
from moonserve.protocol.pb import conductor_pb2_grpc
from moonserve.protocol.process.tracing import Tracer
from tests.simulation.model import VOCABULARY
from tests.simulation.processes.members import CONDUCTOR
from tests.simulation.processes.process import Process, until

CHARACTERS = tuple(bytes([0x40 + token]) for token in range(VOCABULARY))
# Shared by all worlds, since metrics are only added to.
SCHEDULER_METRICS = ConductorMetrics(CollectorRegistry())
REQUEST_METRICS = RequestMetrics(CollectorRegistry(), "model", "gateway", PHASES)


class Conductor(Process):
    """The only conductor of a cluster. It loses all state when it dies."""

    async def start(self) -> None:
        terms = self.world.terms
        limits = Limits(ttft_slo_s=1e6, tbt_slo_s=1e6, placement_ttl_s=60.0, num_decisions=64)
        policy = make_policy(terms.policy, 1.5, terms.seed)
        # Its state has many arrays: validating them after each heartbeat would take most of the run's time.
        self.state = self.checked(ConductorState(policy, limits), seldom=(Heartbeat, Tick))
        self.service = ConductorService(self.state, SCHEDULER_METRICS, self.life.clock, away_after_s=limits.lease_s / 2)
        conductor_pb2_grpc.add_ConductorServicer_to_server(self.service, self.server)

    async def serve(self) -> None:
        await tick_periodically(self.service, 1.0)

    def validate(self) -> None:
        self.state.validate()


class SpelledOut:
    """Tokenizer whose tokens are single characters."""

    def decoder(self, *, skip_special_tokens: bool = True) -> ByteDecoder:
        return ByteDecoder(CHARACTERS)


class Front(Process):
    """A gateway without its HTTP server."""

    async def start(self) -> None:
        config = GatewayConfig(
            model="", conductor=CONDUCTOR, instance_id=self.life.name, request_timeout_s=self.world.terms.time_limit_s
        )
        tokenizer: Any = SpelledOut()
        self.gateway = Gateway(config, self.channels, tokenizer, REQUEST_METRICS, Tracer(), rpc_address="")

    @property
    def is_ready(self) -> bool:
        """True if the gateway's /ready would succeed. Can be read outside of the running loop."""
        asyncio._set_running_loop(self.world.network.loop)
        try:
            return self.gateway.is_ready
        finally:
            asyncio._set_running_loop(None)

    async def serve(self) -> None:
        await self.gateway.cluster.run()

    async def drain(self) -> None:
        self.gateway.drain(refuses=True)
        await until(self._has_answered_all())
        await self.gateway.close()

    async def _has_answered_all(self) -> None:
        while self.gateway.num_live:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.1)

    def unrest(self) -> str:
        return f"{self.gateway.num_live} generations" if self.gateway.num_live else ""
