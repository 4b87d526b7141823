"""Runs a decode worker that also prefills: as `decode_worker.worker`, with loads from and puts to stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from decode_worker import actions
from decode_worker.service import DecodeService
from decode_worker.worker import DecodeWorker
from deploy.undivided.config import UndividedConfig
from deploy.undivided.publishing import Publishing, PutEnded, SealBlocks, Sealed
from deploy.undivided.state import UndividedState
from engine.replica import Replica
from prefill_worker.actions import LoadPrefix, PutBlocks
from prefill_worker.events import PutFailed
from prefill_worker.servicer import PrefillServicer
from prefill_worker.stores import load_prefix, put_blocks
from protocol.pb import conductor_pb2
from protocol.process import Lifecycle
from protocol.step_budget import CHUNK_SHARE, StepBudget
from protocol.wire import decode_profile_from_wire, prefill_profile_from_wire
from transfer.config import Patience
from worker.events import Action, Event
from worker.process import Equipment, equipped


class UndividedService(DecodeService):
    """Service of the worker. `patience`: for calls to stores."""

    state: UndividedState

    patience = Patience()

    def _role_performers(self) -> Mapping[type[Action], Callable[[Any], object]]:
        return {
            **super()._role_performers(),
            LoadPrefix: self._starts(self._load),
            SealBlocks: self._starts(self._seal),
            PutBlocks: self._starts(self._put),
        }

    def load(self) -> conductor_pb2.Load:
        load = super().load()
        load.queued_tokens = self.state.queued_tokens
        return load

    # -- actions

    async def _load(self, action: LoadPrefix) -> Event:
        assert self._stores is not None, "no sources, no loads"
        return await load_prefix(self._stores, self._memory, action, self.patience)

    async def _put(self, action: PutBlocks) -> Event:
        assert self._stores is not None, "nothing is put without stores"
        outcome = await put_blocks(self._stores, self._memory, action, self.patience)
        if isinstance(outcome, PutFailed):
            self._look_for_home()
        return PutEnded(store_id=action.store.instance_id, outcome=outcome)

    async def _seal(self, action: SealBlocks) -> Event:
        await self._memory.staging.store(action.blocks)
        checksums = await self._verifier.checksums(action.blocks)
        return Sealed(seal_id=action.seal_id, checksums=checksums)

    def _send_tokens(self, action: actions.SendTokens) -> None:
        reports = [self.state.report(token.request_id, self.now) for token in action.tokens]
        known = [report for report in reports if report is not None]
        self.streams.send(action.gateway_id, tokens=action.tokens, prefills=known, decodes=action.began)
        for phase in action.ended:
            self._trace(phase)


class UndividedWorker(DecodeWorker):
    """One worker over a loaded replica."""

    service: UndividedService
    service_type = UndividedService

    def __init__(self, config: UndividedConfig, equipment: Equipment) -> None:
        self._own = config
        super().__init__(config, equipment)

    def _make_service(self) -> UndividedService:
        service = super()._make_service()
        assert isinstance(service, UndividedService), "of `service_type`"
        service.patience = self._own.transfer_patience()
        return service

    def _make_state(self) -> UndividedState:
        replica, config = self.equipment.replica, self._own
        publishing = Publishing(self.pool, max_in_flight=config.max_put_blocks, max_pending=config.max_pending_puts)
        limits = config.limits(replica.plan, budget_of(replica, config.tbt_slo))
        policy = config.policy(replica.profiles)
        return UndividedState(self.pool, limits, publishing, policy, self._keeping_costs())

    def _servicer(self) -> PrefillServicer:
        replica = self.equipment.replica
        return PrefillServicer(
            self.service,
            block_size=replica.plan.layout.block_size,
            vocab_size=replica.vocab_size,
            prepare=replica.thread.prepare,
        )

    def _registration(self, address: str) -> conductor_pb2.RegisterRequest:
        registration = super()._registration(address)
        registration.reads_prompts = True
        registration.max_num_batched_tokens = self._own.max_num_batched_tokens
        return registration


def budget_of(replica: Replica, tbt_slo_s: float) -> StepBudget:
    """Returns the time budget of steps with chunks on this replica."""
    prefill, decode = replica.profiles
    return StepBudget(
        decode=decode_profile_from_wire(decode),
        prefill=prefill_profile_from_wire(prefill),
        most_step_s=CHUNK_SHARE * tbt_slo_s,
    )


async def serve(config: UndividedConfig, lifecycle: Lifecycle) -> None:
    """Runs the worker until the process is stopped. Raises ConfigError if it cannot start."""
    async with equipped(config, lifecycle, "decode") as equipment:
        await UndividedWorker(config, equipment).run(lifecycle)
