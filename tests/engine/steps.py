"""Loads engines, builds slices for tests that drive them step by step, and decodes with steps that run ahead."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.generate import generate
from moonserve.engine.engine import Engine
from moonserve.engine.model.batch import Slice
from moonserve.engine.model.config import load_model_config
from moonserve.engine.model.pending_step import PendingStep
from moonserve.protocol.request import RequestId, SamplingParams

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def load_engine(
    path: Path, block_size: int, *, dtype: str = "float32", kv_dtype: str = "auto", **options: Any
) -> Engine:
    """Loads a model that computes in `dtype` and keeps K and V in `kv_dtype`. `options` are those of `Engine.load`."""
    config = load_model_config(path)
    layout = config.kv_layout(block_size, dtype, kv_dtype)
    return Engine.load(path, config=config, layout=layout, dtype=dtype, **options)


def tokens_of(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, **options: Any) -> list[list[int]]:
    """Returns the greedy continuations."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    return [one.token_ids for one in generate(engine, prompts, sampling, **options)]


def random_prompt(length: int, seed: int = 0, vocab_size: int = 256) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def make_slice(
    tokens: Sequence[int], start: int, end: int, blocks: Sequence[int], *, request_id: str = "request", **fields: Any
) -> Slice:
    """Returns a slice of greedy sampling, whose tokens are all of the prompt. `fields` sets other fields of `Slice`."""
    usual = {"sampling": GREEDY, "num_prompt_tokens": len(tokens), "samples": end == len(tokens)}
    place = {"token_ids": tokens, "start": start, "end": end, "block_table": blocks}
    return Slice(request_id=RequestId(request_id), **place, **usual | fields)


def last_of(tokens: Sequence[int], sampling: SamplingParams, num_prompt_tokens: int | None = None) -> Slice:
    """Returns the step that computes the last of these tokens and samples the next one."""
    count = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    return make_slice(tokens, len(tokens) - 1, len(tokens), [0], sampling=sampling, num_prompt_tokens=count)


def decode_ahead(
    engine: Engine, prompts: Sequence[list[int]], wishes: Sequence[SamplingParams], num_tokens: int
) -> list[list[int]]:
    """Returns the tokens after each prompt. All prompts are one step. Each later step begins before the previous one
    has ended, and a sampled token is appended to its history only when its step has ended."""
    per_prompt = engine.layout.blocks_for(max(map(len, prompts)) + num_tokens)
    histories = [list(prompt) for prompt in prompts]

    def blocks_of(row: int) -> range:
        return range(row * per_prompt, (row + 1) * per_prompt)

    def slices(step: int) -> list[Slice]:
        return [
            make_slice(
                histories[row],
                len(prompt) + step - 1 if step else 0,
                len(prompt) + step,
                blocks_of(row),
                request_id=f"{row}",
                sampling=wish,
                num_prompt_tokens=len(prompt),
                samples=True,
                token_from_previous_step=step > 0,
            )
            for row, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True))
        ]

    def end(step: PendingStep) -> None:
        for history, sampled in zip(histories, step.end(), strict=True):
            history.append(sampled.token_id)

    under_way = engine.begin(slices(0))
    for step in range(1, num_tokens):
        ahead = engine.begin(slices(step))
        end(under_way)
        under_way = ahead
    end(under_way)
    return [history[len(prompt) :] for history, prompt in zip(histories, prompts, strict=True)]
