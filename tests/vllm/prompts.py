"""Prompts of the tests: lists of random token ids, which share no prefix unless it is asked for."""

from __future__ import annotations

import random

from tests.vllm.models import VOCAB_SIZE

_EDGES = [32, 64, 96, 128, 160, 192, 224, 256, 288, 384, 512, 640, 768, 1_024]
LENGTHS = [
    *(1, 2, 3, 15, 16, 17),
    *(edge + step for edge in _EDGES for step in (-1, 0, 1)),
    *range(40, 1_000, 27),
    *(2_047, 2_048, 2_049, 3_000, 3_999, 4_000),
]
"""Lengths around the edges of blocks, of the sliding window (128) and of a step's tokens (2,048)."""


def random_prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(VOCAB_SIZE - 1) for _ in range(length)]


def parity_prompts() -> list[list[int]]:
    """Returns a prompt of each length, and prompts that begin as another one and then differ."""
    prompts = [random_prompt(length, 0) for length in LENGTHS]
    trunk = random_prompt(700, 1)
    shared = (0, 1, 31, 32, 33, 64, 100, 128, 160, 320, 500, 640, 699, 700)
    return [*prompts, *(trunk[:count] + random_prompt(1 + count % 50, 2) for count in shared)]
