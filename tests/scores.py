"""A pretended engine's log-probabilities of a prompt: those of the token at position p are -p, so that a test can tell
which were found and where they went."""

from __future__ import annotations

import numpy as np

from engine.batch import Slice
from engine.sampler import num_scored
from protocol.prompt_logprobs import FLOAT, UINT, PromptLogprobs


def scores_of(positions: range, num_top: int) -> PromptLogprobs:
    """Of these tokens; the likeliest there are tokens 0, 1, … at -p - 1, -p - 2, …"""
    at = np.arange(positions.start, positions.stop)
    places = np.arange(num_top)
    return PromptLogprobs(
        logprobs=(-at).astype(FLOAT),
        ranks=(at + 1).astype(UINT),
        top_ids=np.tile(places, (len(at), 1)).astype(UINT),
        top_logprobs=(-at[:, None] - 1 - places).astype(FLOAT),
    )


def pretend(piece: Slice) -> None:
    """What the engine does for a slice that is scored."""
    if piece.scores is not None:
        positions = range(piece.start + 1, piece.start + 1 + num_scored(piece))
        piece.scores.put(piece.start, scores_of(positions, piece.scores.num_top))


def is_whole(found: PromptLogprobs | None, num_prompt_tokens: int) -> bool:
    """Whether these are a prompt's, each token's once and in order."""
    return found is not None and found.logprobs.tolist() == [-p for p in range(1, num_prompt_tokens)]
