"""This project's engine as a contestant, with native kernels and attention, with quantised weights or with torch's.

The KV of contexts is never computed, because the time of a step does not depend on its values.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine.shapes import Shape, prompt_tokens
from benchmarks.engine.speed.contestant import ContestantConfig, StepTimer, StepTimes
from benchmarks.harness.generate import greedy_slice
from moonserve.engine.engine import Engine
from moonserve.engine.model.batch import Slice
from moonserve.engine.model.config import load_model_config
from moonserve.protocol.process.machine import cache_folder

_BLOCK_SIZE = 32
_CHUNK = 512
"""Prompt tokens per step, as in a prefill worker."""


class Moonserve:
    def __init__(self, config: ContestantConfig) -> None:
        self._config = config
        self._model_config = load_model_config(Path(config.folder))
        self._engine = self._load(8)

    def _load(self, num_blocks: int) -> Engine:
        kind = self._config.name.removeprefix("moonserve ")
        kernels, quantise = ("native", kind) if kind.startswith("int") else (kind, "auto")
        return Engine.load(
            Path(self._config.folder),
            config=self._model_config,
            layout=self._model_config.kv_layout(_BLOCK_SIZE, self._config.dtype),
            num_blocks=num_blocks,
            num_threads=len(self._config.cores),
            kernels=kernels,
            attention=kernels,
            quantise=quantise,
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

    def run(self, shape: Shape, steps: int) -> StepTimes:
        if shape.prompt is not None:
            return self._prefill(prompt_tokens(0, shape.prompt, self._model_config.vocab_size))
        slices = [self._context(row, shape.context) for row in range(shape.batch)]
        watch = StepTimer()
        for _ in range(steps):
            watch.step(_count(self._engine.execute(slices)))
        return watch.done()

    def _prefill(self, tokens: list[int]) -> StepTimes:
        ends = [*range(_CHUNK, len(tokens), _CHUNK), len(tokens)]
        watch = StepTimer()
        start = sampled = 0
        for end in ends:
            done = self._engine.execute([self._slice(0, tokens, start, end)])
            start, sampled = end, _count(done)
        watch.step(sampled)
        return watch.done()

    def _context(self, row: int, length: int) -> Slice:
        tokens = prompt_tokens(row, length, self._model_config.vocab_size)
        return self._slice(row, tokens, length - 1)

    def _slice(self, row: int, tokens: list[int], start: int, end: int | None = None) -> Slice:
        blocks = self._engine.layout.blocks_for(len(tokens))
        num_prompt_tokens = len(tokens) if end else start
        table = range(row * blocks, (row + 1) * blocks)
        return greedy_slice(f"row-{row}", tokens, start, end or len(tokens), table, num_prompt_tokens=num_prompt_tokens)


def _count(sampled: Sequence[object]) -> int:
    return sum(one is not None for one in sampled)


make = Moonserve
