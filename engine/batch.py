"""What one step of the engine computes, and what it gives back. Pure data.

A step is any mix of prompt chunks and decode steps; to the engine they are the same thing, a `Slice` of a sequence.

`PromptScores` are the log-probabilities of a prompt's own tokens, as its chunks are computed. The engine puts in what
a step has found, in its thread; whoever has the sequence takes the whole when the prompt's last chunk is computed. A
prompt that is computed again from its beginning replaces what there was. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.ids import BlockId, RequestId
from protocol.prompt_logprobs import PromptLogprobs
from protocol.request import Logprobs, Request, SamplingParams

MAX_SCORED_TOKENS = 256
"""Of one step. Each needs a row of logits: 156 MB of them with a vocabulary of 152,000."""


class PromptScores:
    """Of one prompt. `num_top`: likeliest tokens to tell of beside each."""

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._runs: list[tuple[int, PromptLogprobs]] = []  # by the chunk's start

    def put(self, start: int, run: PromptLogprobs) -> None:
        """Of the tokens at positions `start` + 1 and on. It replaces what later chunks had put in."""
        self._runs = [each for each in self._runs if each[0] < start]
        self._runs.append((start, run))

    def result(self) -> PromptLogprobs:
        """Of all tokens but the first, once all chunks are computed."""
        return PromptLogprobs.joined([run for _, run in self._runs], self.num_top)


def scores_for(request: Request) -> PromptScores | None:
    """None where nobody wants any."""
    num_top = request.sampling.num_prompt_logprobs
    return PromptScores(num_top) if request.scores_prompt and num_top is not None else None


@dataclass(slots=True, kw_only=True, eq=False)
class Slice:
    """The tokens [start, end) of one sequence, whose KV up to `start` is already in its blocks."""

    request_id: RequestId
    token_ids: Sequence[int]  # the whole sequence so far; at least `end` of them
    start: int
    end: int
    block_table: Sequence[BlockId]  # in order; they cover at least `end` tokens
    sampling: SamplingParams
    num_prompt_tokens: int  # the client's prompt; what follows it counts as output for penalties
    samples: bool  # whether the token at position `end` is wanted
    follows: bool = False
    """Its only token is the one that the step begun before it samples for this request; it may be missing in
    `token_ids` while that step is under way."""
    scores: PromptScores | None = None
    """The prompt's tokens behind those of this slice are scored into it; `token_ids` has the one at `end`, too."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The token that follows a slice, or why there is none."""

    request_id: RequestId
    token_id: int
    logprobs: Logprobs | None = None
    failure: str | None = None  # its grammar cannot be followed; the rest means nothing then


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStates:
    """Memory of hidden states between a pipeline's stages: rows [hidden_size] in the compute dtype, at least as many as
    the step has tokens."""

    fetch: Callable[[], memoryview] | None = None  # from the stage before; in the engine's thread
    passed_on: memoryview | None = None  # to the stage behind; is filled
    on_passed: Callable[[], None] | None = None  # called when it is; in the engine's thread
