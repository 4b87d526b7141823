"""`generate` of transformers as a contestant, over a zero-filled cache of the context's length."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteria

from benchmarks.engine.shapes import Shape, prompt_tokens
from benchmarks.engine.speed.contestant import ContestantConfig, StepTimer, StepTimes


class _Steps(StoppingCriteria):
    """Starts the watch at the first token and records each later one as a step. With a given watch, also the first."""

    def __init__(self, watch: StepTimer | None = None) -> None:
        self.watch = watch

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:
        if self.watch is None:
            self.watch = StepTimer()
        else:
            self.watch.step(len(input_ids))
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def turn(self) -> StepTimes:
        assert self.watch is not None
        return self.watch.done()


class Transformers:
    def __init__(self, config: ContestantConfig) -> None:
        torch.set_num_threads(len(config.cores))
        self._dtype = getattr(torch, config.dtype)
        untyped: Any = AutoModelForCausalLM
        self._model = untyped.from_pretrained(config.folder, dtype=self._dtype).eval()
        self._config = self._model.config

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        whole = self._generate(torch.tensor([list(prompt)]), count, DynamicCache(), _Steps())
        tokens: list[int] = whole[0, len(prompt) :].tolist()
        return tokens

    def prepare(self, shape: Shape) -> None:
        self.run(shape, 2)

    def run(self, shape: Shape, steps: int) -> StepTimes:
        length = shape.prompt or shape.context
        vocab_size = self._config.vocab_size
        prompts = torch.tensor([prompt_tokens(row, length, vocab_size) for row in range(shape.batch)])
        if shape.prompt is not None:
            prefill = _Steps(StepTimer())
            self._generate(prompts, 1, DynamicCache(), prefill)
            return prefill.turn()
        decode = _Steps()
        self._generate(prompts, steps + 1, self._cache(shape), decode)
        return decode.turn()

    def _generate(self, prompts: torch.Tensor, tokens: int, cache: DynamicCache, steps: _Steps) -> torch.Tensor:
        whole: torch.Tensor = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            past_key_values=cache,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[steps],
        )
        return whole

    def _cache(self, shape: Shape) -> DynamicCache:
        config, cache = self._config, DynamicCache()
        size = (shape.batch, config.num_key_value_heads, shape.context - 1, config.head_dim)
        for layer in range(config.num_hidden_layers):
            kv = torch.zeros(2, *size, dtype=self._dtype)
            cache.update(kv[0], kv[1], layer)
        return cache


make = Transformers
