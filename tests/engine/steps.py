"""Slices for tests that drive the engine step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.batch import Slice
from protocol.ids import RequestId
from protocol.request import SamplingParams

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def random_prompt(length: int, seed: int = 0, vocab_size: int = 256) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, vocab_size, length).tolist()
    return tokens


def make_slice(
    tokens: Sequence[int],
    start: int,
    end: int,
    blocks: Sequence[int],
    *,
    request_id: str = "request",
    sampling: SamplingParams = GREEDY,
    num_prompt_tokens: int | None = None,
) -> Slice:
    return Slice(
        request_id=RequestId(request_id),
        token_ids=tokens,
        start=start,
        end=end,
        block_table=blocks,
        sampling=sampling,
        num_prompt_tokens=len(tokens) if num_prompt_tokens is None else num_prompt_tokens,
        samples=end == len(tokens),
    )
