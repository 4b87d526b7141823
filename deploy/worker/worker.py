"""A worker that takes turns as prefill and as decode worker over one replica, from start to stop.

Its rule: a turn begins when the one before has ended, and then nothing writes to the pool's memory any more. What
outlives a turn is the replica, the transfer engine with its memory, and the pool's findable blocks.
"""

from __future__ import annotations

import logging
from functools import partial

from prometheus_client import CollectorRegistry

from decode_worker.worker import DecodeWorker
from deploy.worker.config import WorkerConfig
from deploy.worker.servicer import RoleSwitchServicer
from deploy.worker.turn import Turn
from engine.block_pool import BlockPool
from engine.elastic.serving import show_memory
from engine.replica import Replica, loaded_replica
from prefill_worker.worker import PrefillWorker
from protocol.ids import Role
from protocol.pb import worker_pb2_grpc
from protocol.process import Lifecycle, running
from protocol.tracing import Tracer, tracing
from transfer import Segment, TransferEngine
from transfer.serving import serving

log = logging.getLogger(__name__)


class SwitchingWorker:
    """One replica and whose turn it is."""

    def __init__(
        self,
        config: WorkerConfig,
        replica: Replica,
        transfer: TransferEngine,
        segment: Segment,
        registry: CollectorRegistry,
        tracer: Tracer,
    ) -> None:
        self._config = config
        self._replica = replica
        self._transfer = transfer
        self._segment = segment
        self._registry = registry
        self._tracer = tracer
        self._pool: BlockPool | None = None  # of the latest turn

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serves until told to stop. Raises what ends a turn before its time."""
        role: Role | None = self._config.first_role
        while role is not None:
            role = await self._take_turn(role, lifecycle)

    async def _take_turn(self, role: Role, lifecycle: Lifecycle) -> Role | None:
        """The role that is to follow; None when the process is to stop."""
        turn = Turn(role, lifecycle, drain_s=self._config.role_drain_s)
        servicer = RoleSwitchServicer(turn)
        worker = self._worker(role)
        async with running(turn.end_with_process()):
            await worker.run(
                turn, partial(worker_pb2_grpc.add_RoleSwitchServicer_to_server, servicer)
            )
        self._pool = worker.pool
        if turn.next_role is not None:
            log.info("changing from %s to %s", role, turn.next_role)
        return turn.next_role

    def _worker(self, role: Role) -> PrefillWorker | DecodeWorker:
        if role is Role.DECODE:
            return DecodeWorker(
                self._config.as_decode(),
                self._replica,
                self._transfer,
                self._segment,
                self._registry,
                earlier=self._pool,
                tracer=self._tracer,
            )
        return PrefillWorker(
            self._config,
            self._replica,
            self._transfer,
            self._segment,
            self._registry,
            earlier=self._pool,
            tracer=self._tracer,
        )


async def serve(config: WorkerConfig, lifecycle: Lifecycle) -> None:
    """Runs a worker of changing roles until the process is told to stop. Raises ConfigError when it cannot start."""
    with (
        serving(config, config.faults()) as (transfer, registry),
        tracing(config, config.instance_id, "worker") as tracer,
    ):
        async with loaded_replica(config, transfer.allocate, lifecycle) as (replica, segment):
            show_memory(replica.elasticity, registry)
            await SwitchingWorker(config, replica, transfer, segment, registry, tracer).run(
                lifecycle
            )
