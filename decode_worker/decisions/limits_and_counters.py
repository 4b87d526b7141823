"""Scheduling limits and counters of a decode worker."""

from dataclasses import dataclass

from moonserve.decode_worker.decisions.speculation import Speculation
from moonserve.protocol.step_time import StepBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Scheduling limits, fixed for the life of the process."""

    block_size: int  # tokens
    max_num_seqs: int  # sequences in one step
    max_num_batched_tokens: int  # tokens in one step; at least max_num_seqs
    max_model_len: int  # tokens in one sequence
    budget: StepBudget | None = None
    """Time budget of steps that contain chunks of prompts; None: no limit."""
    runs_ahead: bool = False  # a step is prepared while the one before it runs
    speculation: Speculation | None = None  # None: sequences draft nothing

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)


@dataclass(slots=True, eq=False)
class Counters:
    """Counters since the start. GetStatus shows them under these names."""

    leases_granted: int = 0
    leases_expired: int = 0
    reserves_refused: int = 0
    landed_blocks: int = 0
    shared_blocks: int = 0  # granted from the prefix cache, so not sent
    commits_accepted: int = 0
    commits_rejected: int = 0
    integrity_failures: int = 0  # corrupt blocks found at commit
    steps: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    num_draft_tokens: int = 0  # guessed and computed beside the next token of a sequence
    num_accepted_tokens: int = 0  # of these, tokens that were right
    prompt_tokens: int = 0  # in chunks of two or more tokens, of prompts that were not prefilled elsewhere
    num_preemptions: int = 0
    preemptions_kept: int = 0  # preemptions that put blocks into the store
    answers_kept: int = 0  # answers of finished sequences that were given to the store
    answers_dropped: int = 0  # answers not put because too many moves were in flight
    kept_blocks: int = 0  # blocks of complete puts, including blocks that the store had already
    keep_failures: int = 0  # puts of which the store did not take every block
    fetched_blocks: int = 0  # read back from the store instead of being computed again
    requests_finished: int = 0
    requests_failed: int = 0
    requests_dropped: int = 0  # cancelled, superseded, or their gateway was lost

    def count_chunk(self, num_tokens: int, *, is_new: bool) -> None:
        """Counts tokens computed in one chunk. `is_new`: the sequence has generated no token on this worker."""
        if is_new:
            self.prompt_tokens += num_tokens
        else:
            self.recomputed_tokens += num_tokens

    def count_draft(self, num_tokens: int, num_accepted: int) -> None:
        """Counts the draft of one sequence in one step."""
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted
