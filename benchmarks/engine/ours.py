"""This project's engine as a contestant, with native kernels and attention or with torch's.

The KV of contexts is never computed, because the time of a step does not depend on its values.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine.contestants import Wish
from benchmarks.engine.shapes import Shape, prompt_tokens
from benchmarks.engine.turn import Turn, Watch
from engine.batch import Slice
from engine.config import load_model_config
from engine.engine import Engine
from protocol.ids import RequestId
from protocol.machine import cache_folder
from protocol.request import SamplingParams

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_BLOCK_SIZE = 32
_CHUNK = 512
"""Prompt tokens per step, as in a prefill worker."""


class Ours:
    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._config = load_model_config(Path(wish.folder))
        self._engine = self._load(8)

    def _load(self, num_blocks: int) -> Engine:
        kernels = self._wish.name.removeprefix("moonserve ")
        return Engine.load(
            Path(self._wish.folder),
            config=self._config,
            layout=self._config.kv_layout(_BLOCK_SIZE, self._wish.dtype),
            num_blocks=num_blocks,
            num_threads=len(self._wish.cores),
            kernels=kernels,
            attention=kernels,
            cache_folder=cache_folder(os.environ, Path.home()),
        )

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        start = 0
        for _ in range(count):
            [sampled] = self._engine.execute([self._slice(0, tokens, start)])
            assert sampled is not None
            start = len(tokens)
            tokens.append(sampled.token_id)
        return tokens[len(prompt) :]

    def prepare(self, shape: Shape) -> None:
        blocks = self._engine.layout.blocks_for(shape.prompt or shape.context)
        if blocks * shape.batch > self._engine.num_blocks:
            self._engine = self._load(blocks * shape.batch)
        self.run(shape, 2)

    def run(self, shape: Shape, steps: int) -> Turn:
        if shape.prompt is not None:
            return self._prefill(prompt_tokens(0, shape.prompt, self._config.vocab_size))
        slices = [self._context(row, shape.context) for row in range(shape.batch)]
        watch = Watch()
        for _ in range(steps):
            watch.step(_count(self._engine.execute(slices)))
        return watch.done()

    def _prefill(self, tokens: list[int]) -> Turn:
        ends = [*range(_CHUNK, len(tokens), _CHUNK), len(tokens)]
        watch = Watch()
        start = sampled = 0
        for end in ends:
            done = self._engine.execute([self._slice(0, tokens, start, end)])
            start, sampled = end, _count(done)
        watch.step(sampled)
        return watch.done()

    def _context(self, row: int, length: int) -> Slice:
        tokens = prompt_tokens(row, length, self._config.vocab_size)
        return self._slice(row, tokens, length - 1)

    def _slice(self, row: int, tokens: list[int], start: int, end: int | None = None) -> Slice:
        blocks = self._engine.layout.blocks_for(len(tokens))
        return Slice(
            request_id=RequestId(f"row-{row}"),
            token_ids=tokens,
            start=start,
            end=end or len(tokens),
            block_table=range(row * blocks, (row + 1) * blocks),
            sampling=_GREEDY,
            num_prompt_tokens=len(tokens) if end else start,
            samples=end in (None, len(tokens)),
        )


def _count(sampled: Sequence[object]) -> int:
    return sum(one is not None for one in sampled)


make = Ours
