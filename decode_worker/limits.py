"""The bounds within which a decode worker schedules, and what it counts about itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from protocol.step_budget import StepBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Fixed for the life of the process."""

    block_size: int  # tokens
    max_num_seqs: int  # sequences in one step
    max_num_batched_tokens: int  # tokens in one step; at least max_num_seqs
    max_model_len: int  # tokens of a sequence
    budget: StepBudget | None = None
    """Of time, for steps with chunks of prompts; None: as long as it takes."""
    runs_ahead: bool = False  # a step is prepared while the one before it runs

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


@dataclass(slots=True, eq=False)
class Counters:
    """Shown by GetStatus under these names."""

    leases_granted: int = 0
    leases_expired: int = 0
    reserves_refused: int = 0
    landed_blocks: int = 0
    shared_blocks: int = 0  # granted without being sent
    commits_accepted: int = 0
    commits_rejected: int = 0
    integrity_failures: int = 0  # corrupt blocks found at commit
    steps: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0  # in chunks of two and more, of prompts that nobody prefilled
    num_preemptions: int = 0
    preemptions_kept: int = 0  # whose blocks went to the store, or some of them
    answers_kept: int = 0  # whose blocks go to the store when they have finished
    answers_dropped: int = 0  # because too much was on its way there
    kept_blocks: int = 0  # that the store has, or had already
    keep_failures: int = 0  # puts that it did not take whole
    fetched_blocks: int = 0  # read back instead of being computed again
    requests_finished: int = 0
    requests_failed: int = 0
    requests_dropped: int = 0  # cancelled, superseded, or their gateway was lost

    def count_chunk(self, num_tokens: int, *, is_new: bool) -> None:
        """So many tokens of a prompt are computed; `is_new`: for the first time, as far as known here."""
        if is_new:
            self.prompt_tokens += num_tokens
        else:
            self.recomputed_tokens += num_tokens

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
