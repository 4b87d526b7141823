"""Input and output types of one engine step. Pure data, no tensors.

A step is any mix of prefill chunks and decode tokens; the engine treats both as a `Slice` of a sequence.

`PromptScores` collects the log-probabilities of a prompt's own tokens while its chunks are computed. The engine's
thread adds the result of each step; the sequence's owner reads the whole when the last chunk is computed. If the prompt
is computed again from its beginning, new results replace old ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonserve.protocol.request import BlockId, Logprobs, PromptLogprobs, Request, RequestId, SamplingParams

MAX_SCORED_TOKENS = 256
"""Prompt tokens scored in one step. Each needs a row of logits: together 156 MB with a vocabulary of 152,000."""


class PromptScores:
    """Log-probabilities of one prompt. `num_top`: number of most likely tokens reported at each position."""

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._runs: list[tuple[int, PromptLogprobs]] = []  # (start of the chunk, its scores)

    def put(self, start: int, run: PromptLogprobs) -> None:
        """Adds scores of the tokens from position `start` + 1 on, and drops those of chunks at or after `start`."""
        self._runs = [each for each in self._runs if each[0] < start]
        self._runs.append((start, run))

    def result(self) -> PromptLogprobs:
        """Returns the scores of all tokens but the first. Valid once all chunks are computed."""
        return PromptLogprobs.joined([run for _, run in self._runs], self.num_top)


def scores_for(request: Request) -> PromptScores | None:
    """Creates the `PromptScores` of a request, or returns None if it does not ask for prompt log-probabilities."""
    num_top = request.sampling.num_prompt_logprobs
    return PromptScores(num_top) if request.scores_prompt and num_top is not None else None


@dataclass(slots=True, kw_only=True, eq=False)
class Slice:
    """Tokens [start, end) of one sequence, whose KV up to `start` is already in its blocks."""

    request_id: RequestId
    token_ids: Sequence[int]  # the whole sequence so far; at least `end` of them
    start: int
    end: int
    block_table: Sequence[BlockId]  # in order; they cover at least `end` tokens
    sampling: SamplingParams
    num_prompt_tokens: int  # the client's prompt; later tokens count as output for penalties
    samples: bool  # True if the token at position `end` is to be sampled
    token_from_previous_step: bool = False
    """True if the slice's only token is sampled for this request by the step begun before. The token may be missing
    from `token_ids` while that step is in flight."""
    scores: PromptScores | None = None
    """Receives the scores of the prompt tokens that follow each token of this slice. `token_ids` must then include the
    token at `end`."""
    num_draft: int = 0
    """How many of the slice's last tokens are guesses. A token is sampled after each of them, too."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The token sampled after a slice, or the reason why there is none."""

    request_id: RequestId
    token_id: int
    logprobs: Logprobs | None = None
    failure: str | None = None  # why the grammar cannot be followed; the other fields are then meaningless
    after_draft: "tuple[Sampled, ...]" = ()
    """Tokens sampled after each draft token of the slice. Each is valid only if the draft is right up to there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """Buffers of hidden states between pipeline stages: rows [hidden_size] in the compute dtype, at least one per token
    of the step. The callables run in the engine's thread."""

    fetch: Callable[[], memoryview] | None = None  # returns the previous stage's rows
    passed_on: memoryview | None = None  # filled for the next stage
    on_passed: Callable[[], None] | None = None  # called when `passed_on` is filled
