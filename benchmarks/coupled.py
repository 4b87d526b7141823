"""The two baselines of the serving benchmark: moonserve's engine alone in this process, and transformers `generate`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.batch import Slice
from engine.config import load_model_config
from engine.engine import Engine
from protocol.ids import RequestId
from protocol.machine import cache_folder
from protocol.request import SamplingParams
from protocol.timeline import Timeline


class BareEngine:
    """The engine without a cluster: prefills, then decodes in one batch."""

    def __init__(self, model_path: Path, *, block_size: int, chunk: int, num_threads: int) -> None:
        config = load_model_config(model_path)
        layout = config.kv_layout(block_size, "bfloat16")
        self._block_size = block_size
        self._chunk = chunk
        self._num_threads = num_threads
        self._engine = Engine.load(
            model_path,
            config=config,
            layout=layout,
            num_blocks=2048,
            num_threads=num_threads,
            cache_folder=cache_folder(os.environ, Path.home()),
        )

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        """Prefills the prompts, which arrive at once, in turn, then decodes them together."""
        torch.set_num_threads(self._num_threads)
        slices = [self._slice(n, prompt, max_tokens) for n, prompt in enumerate(prompts)]
        arrived_at = time.monotonic()
        instants: list[list[float]] = [self._prefill(slice_) for slice_ in slices]
        for _ in range(max_tokens - 1):
            for slice_ in slices:
                slice_.start, slice_.end = slice_.end, slice_.end + 1
            self._execute(slices)
            now = time.monotonic()
            for at in instants:
                at.append(now)
        return [Timeline(arrived_at, tuple(at)) for at in instants]

    def _prefill(self, slice_: Slice) -> list[float]:
        length = len(slice_.token_ids)
        for start in range(0, length, self._chunk):
            slice_.start, slice_.end = start, min(start + self._chunk, length)
            slice_.samples = slice_.end == length
            self._execute([slice_])
        return [time.monotonic()]

    def _execute(self, slices: Sequence[Slice]) -> None:
        for slice_, sampled in zip(slices, self._engine.execute(slices), strict=True):
            if sampled is not None:
                assert isinstance(slice_.token_ids, list)
                slice_.token_ids.append(sampled.token_id)

    def _slice(self, number: int, prompt: Sequence[int], max_tokens: int) -> Slice:
        blocks = -(-(len(prompt) + max_tokens) // self._block_size)
        return Slice(
            request_id=RequestId(str(number)),
            token_ids=list(prompt),
            start=0,
            end=0,
            block_table=list(range(number * blocks, (number + 1) * blocks)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            num_prompt_tokens=len(prompt),
            samples=False,
        )


class TransformersGenerate:
    """Greedy `generate` of transformers on one batch of equally long prompts."""

    def __init__(self, model_path: Path, num_threads: int) -> None:
        self._num_threads = num_threads
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
        self._model.train(False)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Timeline]:
        torch.set_num_threads(self._num_threads)
        clock = _Clock()
        arrived_at = time.monotonic()
        with torch.inference_mode():
            self._model.generate(
                torch.tensor(list(prompts)),
                attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[clock],
            )
        return [Timeline(arrived_at, tuple(clock.instants)) for _ in prompts]


class _Clock:
    """A stopping criterion that never stops, and records the end of each step."""

    def __init__(self) -> None:
        self.instants: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.instants.append(time.monotonic())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)
