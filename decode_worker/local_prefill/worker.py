"""Runs a decode worker that also prefills: `decode_worker.worker` with other options, and with loads from and puts to
stores."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moonserve.decode_worker.config import DecodeConfig
from moonserve.decode_worker.decisions import events
from moonserve.decode_worker.local_prefill.publishing import BlockPublisher, PutEnded, SealBlocks, Sealed
from moonserve.decode_worker.local_prefill.state import LocalPrefillState
from moonserve.decode_worker.service import DecodeService
from moonserve.decode_worker.worker import DecodeWorker
from moonserve.engine.replica import Replica
from moonserve.prefill_worker.decisions.events import LoadPrefix, PutBlocks, PutFailed
from moonserve.prefill_worker.store_io import load_prefix, put_blocks
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.process.config import option, require_at_least_1
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.step_time import CHUNK_SHARE, DEFAULT_TBT_SLO_S, StepBudget
from moonserve.transfer.config import TransferTimeout, TransferTimeoutConfig
from moonserve.worker.events import Action, Event
from moonserve.worker.process import worker_resources


@dataclass(frozen=True, kw_only=True)
class LocalPrefillConfig(DecodeConfig, TransferTimeoutConfig):
    """Options of `moonserve worker --role decode --conditional-disaggregation on`: those of a decode worker, and those
    for stores and the TBT target."""

    tbt_slo: float = option(
        DEFAULT_TBT_SLO_S,
        help="seconds between tokens, the conductor's objective; steps with chunks of prompts take half of it",
    )
    max_put_blocks: int = option(64, help="maximum number of blocks being written to a store")
    max_pending_puts: int = option(4096, help="maximum number of blocks waiting to be written; more are dropped")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least_1(self, "max_put_blocks", "max_pending_puts")
        self.transfer_timeout()
        if self.async_scheduling:
            raise ConfigError(
                "--async-scheduling cannot be combined with --conditional-disaggregation, which limits steps by time"
            )
        if not self.tbt_slo > 0:
            raise ConfigError("--tbt-slo must be positive")


class LocalPrefillService(DecodeService):
    """Service of the worker. `patience`: for calls to stores."""

    state: LocalPrefillState

    patience = TransferTimeout()

    def _role_action_handlers(self) -> Mapping[type[Action], Callable[[Any], object]]:
        return {
            **super()._role_action_handlers(),
            LoadPrefix: self._as_operation(self._load),
            SealBlocks: self._as_operation(self._seal),
            PutBlocks: self._as_operation(self._put),
        }

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

    def _send_tokens(self, action: events.SendTokens) -> None:
        reports = [self.state.report(token.request_id, self.now) for token in action.tokens]
        known = [report for report in reports if report is not None]
        self.streams.send(action.gateway_id, tokens=action.tokens, prefills=known, decodes=action.began)
        for phase in action.ended:
            self._trace(phase)


class LocalPrefillWorker(DecodeWorker):
    """One worker over a loaded replica."""

    service: LocalPrefillService
    service_type = LocalPrefillService
    takes_submissions = True
    _config: LocalPrefillConfig

    def _make_service(self) -> LocalPrefillService:
        service = super()._make_service()
        assert isinstance(service, LocalPrefillService), "of `service_type`"
        service.patience = self._config.transfer_timeout()
        return service

    def _make_state(self) -> LocalPrefillState:
        replica, config = self.resources.replica, self._config
        publishing = BlockPublisher(self.pool, max_in_flight=config.max_put_blocks, max_pending=config.max_pending_puts)
        budget, speculation = step_budget_of(replica, config.tbt_slo), config.speculation(replica)
        limits = config.limits(replica.plan, budget, speculation=speculation)
        policy = config.policy(replica)
        return LocalPrefillState(self.pool, limits, publishing, policy, self._offload_costs())

    def _registration(self, address: str) -> conductor_pb2.RegisterRequest:
        registration = super()._registration(address)
        registration.reads_prompts = True
        registration.max_num_batched_tokens = self._config.max_num_batched_tokens
        return registration


def step_budget_of(replica: Replica, tbt_slo_s: float) -> StepBudget:
    """Returns the time budget of steps with chunks on this replica."""
    prefill, decode = replica.step_costs
    return StepBudget(decode=decode, prefill=prefill, max_step_s=CHUNK_SHARE * tbt_slo_s)


async def serve(config: LocalPrefillConfig, lifecycle: Lifecycle) -> None:
    """Runs the worker until the process is stopped. Raises ConfigError if it cannot start."""
    async with worker_resources(config, lifecycle, "decode") as equipment:
        await LocalPrefillWorker(config, equipment).run(lifecycle)
