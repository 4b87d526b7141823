"""Options of a decode worker, and the limits that follow from them and the pool."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.limits import Limits
from engine.replica import PoolPlan, ReplicaConfig
from protocol.errors import ConfigError
from protocol.step_budget import StepBudget
from transfer.config import TransferConfig


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(ReplicaConfig, TransferConfig):
    """A decode worker needs no options of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs {self.max_num_seqs}: each sequence of a step computes a token"
            )

    def limits(self, plan: PoolPlan, budget: StepBudget | None = None) -> Limits:
        """`budget`: of time, for steps with chunks of prompts."""
        return Limits(
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            budget=budget,
        )
