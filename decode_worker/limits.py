"""The bounds within which a decode worker schedules."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.step_budget import StepBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Fixed for the life of the process."""

    block_size: int  # tokens
    max_num_seqs: int  # sequences in one step
    max_num_batched_tokens: int  # tokens in one step; at least max_num_seqs
    max_model_len: int  # tokens of a sequence
    budget: StepBudget | None = (
        None  # of time, for steps with chunks of prompts; None: as long as it takes
    )

    runs_ahead: bool = False  # a step is prepared while the one before it runs

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
