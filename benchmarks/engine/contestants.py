"""Who is measured: our engine with either set of kernels, and `transformers` generate. One per process (`side.py`).

Each makes a model ready, then times decode steps of a batch at a context, and prompts. KV of contexts is whatever lies
there: the time does not depend on it. On one core the time is the processor's: whoever computes never waits there, and
what other programs take of the core is not theirs.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StoppingCriteria

from benchmarks.engine.shapes import BLOCK_SIZE, CHUNK, Shape
from engine.batch import Slice
from engine.config import load_model_config
from engine.engine import Engine, set_threads
from engine.kv_pool import TORCH_DTYPES
from protocol.ids import RequestId
from protocol.machine import cache_folder
from protocol.request import SamplingParams

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class Contestant(Protocol):
    def prepare(self, shape: Shape) -> None:
        """Makes room for it, and warms up."""

    def run(self, shape: Shape, steps: int) -> list[float]:
        """Seconds of each of `steps` decode steps, or of one prompt."""


Clock = Callable[[], float]


def clock_for(threads: int) -> Clock:
    return time.process_time if threads == 1 else time.perf_counter


def make(name: str, folder: Path, dtype: str, threads: int) -> Contestant:
    if name == "transformers":
        return Transformers(folder, dtype, threads)
    return Ours(name.removeprefix("moonserve "), folder, dtype, threads)


class Ours:
    """`kernels`: native or torch; attention likewise."""

    def __init__(self, kernels: str, folder: Path, dtype: str, threads: int) -> None:
        self._kernels = kernels
        self._folder = folder
        self._dtype = dtype
        self._threads = threads
        self._clock = clock_for(threads)
        self._config = load_model_config(folder)
        self._engine = self._load(1)

    def _load(self, num_blocks: int) -> Engine:
        return Engine.load(
            self._folder,
            config=self._config,
            layout=self._config.kv_layout(BLOCK_SIZE, self._dtype),
            num_blocks=num_blocks,
            num_threads=self._threads,
            load_format="dummy",
            kernels=self._kernels,
            attention=self._kernels,
            cache_folder=cache_folder(os.environ, Path.home()),
        )

    def prepare(self, shape: Shape) -> None:
        blocks = self._engine.layout.blocks_for(shape.prompt or shape.context)
        if blocks * shape.batch > self._engine.num_blocks:
            self._engine = self._load(blocks * shape.batch)
        self.run(shape, 2)

    def run(self, shape: Shape, steps: int) -> list[float]:
        if shape.prompt is not None:
            chunks = range(0, shape.prompt, CHUNK)
            begin = self._clock()
            for start in chunks:
                end = min(start + CHUNK, shape.prompt)
                self._engine.execute([self._slice(0, start, end, shape.prompt)])
            return [self._clock() - begin]
        context = shape.context
        slices = [self._slice(row, context - 1, context, context) for row in range(shape.batch)]
        return [self._step(slices) for _ in range(steps)]

    def _step(self, slices: Sequence[Slice]) -> float:
        begin = self._clock()
        self._engine.execute(slices)
        return self._clock() - begin

    def _slice(self, row: int, start: int, end: int, length: int) -> Slice:
        blocks = self._engine.layout.blocks_for(length)
        return Slice(
            request_id=RequestId(f"row-{row}"),
            token_ids=[(7 * place + row) % self._config.vocab_size for place in range(length)],
            start=start,
            end=end,
            block_table=range(row * blocks, (row + 1) * blocks),
            sampling=_GREEDY,
            num_prompt_tokens=length,
            samples=end == length,
        )


class _Instants(StoppingCriteria):
    """Notes when each token was there."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.instants: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:
        self.instants.append(self._clock())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    """`generate` over a cache of the context's length."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        set_threads(threads)
        self._clock = clock_for(threads)
        config = AutoConfig.from_pretrained(folder)
        make: Any = AutoModelForCausalLM.from_config  # untyped
        self._model = make(config, dtype=TORCH_DTYPES[dtype]).eval()
        self._config = config
        self._dtype = TORCH_DTYPES[dtype]

    def prepare(self, shape: Shape) -> None:
        self.run(shape, 2)

    def run(self, shape: Shape, steps: int) -> list[float]:
        if shape.prompt is not None:
            begin = self._clock()
            return [self._generate(shape, shape.prompt, 1, DynamicCache())[0] - begin]
        instants = self._generate(shape, shape.context, steps + 1, self._cache(shape))
        return [later - earlier for earlier, later in itertools.pairwise(instants)]

    def _generate(self, shape: Shape, length: int, tokens: int, cache: DynamicCache) -> list[float]:
        noted = _Instants(self._clock)
        prompt = torch.arange(length).remainder(self._config.vocab_size)
        prompts = prompt.expand(shape.batch, -1).contiguous()
        self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            past_key_values=cache,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[noted],
        )
        return noted.instants

    def _cache(self, shape: Shape) -> DynamicCache:
        config, cache = self._config, DynamicCache()
        size = (shape.batch, config.num_key_value_heads, shape.context - 1, config.head_dim)
        for layer in range(config.num_hidden_layers):
            kv = torch.zeros(2, *size, dtype=self._dtype)
            cache.update(kv[0], kv[1], layer)
        return cache
