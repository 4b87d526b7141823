"""Command-line options of a decode worker, and the limits that follow from them and from the pool plan."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.limits import Limits
from engine.device import CUDA
from engine.lookahead.base import OnDemand, Policy
from engine.lookahead.lookahead import Costs, Lookahead
from engine.pool_plan import PoolPlan
from engine.replica import Profiles
from protocol.config import option
from protocol.errors import ConfigError
from protocol.step_budget import StepBudget
from protocol.wire import decode_profile_from_wire, prefill_profile_from_wire
from worker.config import RoleConfig


@dataclass(frozen=True, kw_only=True)
class AllotmentConfig:
    """Options of block allocation and scheduling. A mixin for processes that become or start decode workers."""

    block_allocation: str = option(
        "lookahead",
        help="how many sequences share a decode worker's KV: lookahead = by what they will probably need, as "
        "learned from those that ended; on-demand = while there is a free block for each",
        choices=("lookahead", "on-demand"),
    )

    async_scheduling: bool | None = option(
        None,
        help="prepare a decode step while the one before it runs; when not given, on GPUs only: a processor that "
        "prepares computes nothing meanwhile (docs/cuda.md)",
    )

    def runs_ahead(self, device: str) -> bool:
        """Returns True if a decode worker on this device prepares a step while the one before it runs."""
        return device == CUDA if self.async_scheduling is None else self.async_scheduling

    def policy(self, profiles: Profiles) -> Policy:
        """Returns the admission policy. `profiles` are the replica's measured prefill and decode profiles."""
        if self.block_allocation == "on-demand":
            return OnDemand()
        prefill, decode = profiles
        costs = Costs(
            decode=decode_profile_from_wire(decode),
            prefill=prefill_profile_from_wire(prefill),
        )
        # A worker that has not learned anything yet must not assume that every answer is as long as it may become.
        return Lookahead(costs=costs, until_known=OnDemand())


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(RoleConfig, AllotmentConfig):
    """Configuration of a decode worker."""

    store_writes: str = option(
        "all",
        help="what is put into the home store unasked: all = answers, too, so that a conversation's next turn finds "
        "them; hot = only what gave way",
        choices=("all", "hot"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs {self.max_num_seqs}: each sequence of a step computes a token"
            )
        if self.async_scheduling and self.is_elastic:
            raise ConfigError(
                "--async-scheduling does not go with elastic KV memory, which blocks leave between two steps"
            )

    def limits(self, plan: PoolPlan, budget: StepBudget | None = None, *, runs_ahead: bool = False) -> Limits:
        """Returns the scheduling limits. `budget` bounds the time of steps that contain chunks of prompts."""
        return Limits(
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            budget=budget,
            runs_ahead=runs_ahead,
        )
