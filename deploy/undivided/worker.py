"""A decode worker that also prefills, from start to stop: as `decode_worker.worker`, with a way to the stores."""

from __future__ import annotations

from typing import cast

from prometheus_client import CollectorRegistry

from decode_worker.service import DecodeService
from decode_worker.worker import DecodeWorker
from deploy.undivided.config import UndividedConfig
from deploy.undivided.publishing import Publishing
from deploy.undivided.service import UndividedService
from deploy.undivided.state import UndividedState
from engine.elastic.serving import show_memory
from engine.replica import Replica, loaded_replica
from prefill_worker.service import PrefillService
from prefill_worker.servicer import WorkerServicer
from protocol.keys import BlockKey
from protocol.membership import Seat
from protocol.pb import conductor_pb2, worker_pb2_grpc
from protocol.process import Lifecycle
from protocol.step_budget import CHUNK_SHARE, StepBudget
from protocol.tracing import Tracer, tracing
from protocol.wire import decode_profile_from_wire, prefill_profile_from_wire
from transfer import Segment, TransferEngine
from transfer.serving import serving


class UndividedWorker(DecodeWorker):
    """One worker over a loaded replica."""

    service: UndividedService

    def __init__(
        self,
        config: UndividedConfig,
        replica: Replica,
        transfer: TransferEngine,
        segment: Segment,
        registry: CollectorRegistry,
        tracer: Tracer | None = None,
    ) -> None:
        self._options = config
        self._publishing: Publishing | None = None
        super().__init__(config, replica, transfer, segment, registry, tracer=tracer)
        self._servicer = WorkerServicer(
            cast(PrefillService, self.service),
            block_size=replica.plan.layout.block_size,
            vocab_size=replica.vocab_size,
            prepare=replica.thread.prepare,
        )

    def _make_service(self, transfer: TransferEngine, segment: Segment) -> DecodeService:
        replica, config = self._replica, self._options
        self._publishing = Publishing(
            self.pool, max_in_flight=config.max_put_blocks, max_pending=config.max_pending_puts
        )
        limits = config.limits(replica.plan, budget_of(replica, config.tbt_slo))
        return UndividedService(
            UndividedState(
                self.pool,
                limits,
                self._publishing,
                config.policy(replica.profiles),
                self._keeping_costs(),
            ),
            replica.thread,
            transfer,
            segment,
            replica.plan.layout,
            stores=self._stores,
            staging=replica.staging,
            patience=config.transfer_patience(),
            look_for_home=self._look_for_home,
            observe_allocation=self._allocations.observe,
            tracer=self._tracer,
        )

    def _make_servicer(self) -> worker_pb2_grpc.WorkerServicer:
        return self._servicer

    def _removed(self, key: BlockKey) -> None:
        super()._removed(key)
        if self._publishing is not None:
            self._publishing.evicted(key)

    def _set_draining(self, seat: Seat, draining: bool) -> None:
        self._servicer.draining = draining
        super()._set_draining(seat, draining)

    def _registration(self, address: str) -> conductor_pb2.RegisterRequest:
        registration = super()._registration(address)
        registration.reads_prompts = True
        registration.max_num_batched_tokens = self._options.max_num_batched_tokens
        return registration


def budget_of(replica: Replica, tbt_slo_s: float) -> StepBudget:
    """What steps with chunks may take on this replica."""
    prefill, decode = replica.profiles
    return StepBudget(
        decode=decode_profile_from_wire(decode),
        prefill=prefill_profile_from_wire(prefill),
        most_step_s=CHUNK_SHARE * tbt_slo_s,
    )


async def serve(config: UndividedConfig, lifecycle: Lifecycle) -> None:
    """Runs the worker until the process is told to stop. Raises ConfigError when it cannot start."""
    with (
        serving(config) as (transfer, registry),
        tracing(config, config.instance_id, "decode") as tracer,
    ):
        async with loaded_replica(config, transfer.allocate, lifecycle) as (replica, segment):
            show_memory(replica.elasticity, registry)
            await UndividedWorker(config, replica, transfer, segment, registry, tracer).run(
                lifecycle
            )
