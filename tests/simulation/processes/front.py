"""A gateway of a simulated cluster."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.config import GatewayConfig
from gateway.generation.detokenize import ByteDecoder
from gateway.generation.service import Gateway
from gateway.generation.timings import PHASES
from protocol.metrics import RequestMetrics
from protocol.tracing import Tracer
from tests.simulation.model import VOCABULARY
from tests.simulation.processes.member import CONDUCTOR
from tests.simulation.processes.process import Process, until

CHARACTERS = tuple(bytes([0x40 + token]) for token in range(VOCABULARY))
# One for all worlds: they are only added to.
REQUEST_METRICS = RequestMetrics(CollectorRegistry(), "model", "gateway", PHASES)


class SpelledOut:
    """A tokenizer whose tokens are characters."""

    def decoder(self, *, skip_special_tokens: bool = True) -> ByteDecoder:
        return ByteDecoder(CHARACTERS)


class Front(Process):
    """A gateway without its HTTP."""

    async def start(self) -> None:
        config = GatewayConfig(
            model="", conductor=CONDUCTOR, instance_id=self.life.name, request_timeout_s=self.world.terms.time_limit_s
        )
        tokenizer: Any = SpelledOut()
        self.gateway = Gateway(config, self.channels, tokenizer, REQUEST_METRICS, Tracer(), rpc_address="")

    @property
    def is_ready(self) -> bool:
        """As its /ready says, whoever asks."""
        asyncio._set_running_loop(self.world.network.loop)
        try:
            return self.gateway.is_ready
        finally:
            asyncio._set_running_loop(None)

    async def serve(self) -> None:
        await self.gateway.run()

    async def drain(self) -> None:
        self.gateway.drain(refuses=True)
        await until(self._has_answered_all())
        await self.gateway.close()

    async def _has_answered_all(self) -> None:
        while self.gateway.num_live:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.1)

    def unrest(self) -> str:
        return f"{self.gateway.num_live} generations" if self.gateway.num_live else ""
