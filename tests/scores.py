"""Simulated prompt log-probabilities of an engine. The token at position p has -p, so that a test can tell which
values were computed and where they went."""

import numpy as np

from moonserve.engine.model.batch import Slice
from moonserve.engine.model.sampler import num_scored
from moonserve.protocol.request import LOGPROB_DTYPE, RANK_DTYPE, PromptLogprobs


def scores_of(positions: range, num_top: int) -> PromptLogprobs:
    """Returns the values of these positions. The likeliest tokens are 0, 1, … with -p - 1, -p - 2, …"""
    at = np.arange(positions.start, positions.stop)
    places = np.arange(num_top)
    return PromptLogprobs(
        logprobs=(-at).astype(LOGPROB_DTYPE),
        ranks=(at + 1).astype(RANK_DTYPE),
        top_ids=np.tile(places, (len(at), 1)).astype(RANK_DTYPE),
        top_logprobs=(-at[:, None] - 1 - places).astype(LOGPROB_DTYPE),
    )


def pretend(piece: Slice) -> None:
    """Stores the scores of a slice as the engine does, if the slice is scored."""
    if piece.scores is not None:
        positions = range(piece.start + 1, piece.start + 1 + num_scored(piece))
        piece.scores.put(piece.start, scores_of(positions, piece.scores.num_top))


def is_whole(found: PromptLogprobs | None, num_prompt_tokens: int) -> bool:
    """True if these are the scores of a whole prompt, each token once and in order."""
    return found is not None and found.logprobs.tolist() == [-p for p in range(1, num_prompt_tokens)]
