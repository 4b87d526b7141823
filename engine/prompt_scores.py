"""The log-probabilities of a prompt's own tokens, as its chunks are computed.

The engine puts in what a step has found, in its thread; whoever has the sequence takes the whole when the prompt's last
chunk is computed. A prompt that is computed again from its beginning replaces what there was. Knows no tensors.
"""

from __future__ import annotations

from protocol.prompt_logprobs import PromptLogprobs
from protocol.request import Request

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
