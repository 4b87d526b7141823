"""vLLM's engine as a contestant, within this process: without server and messages, the most favourable setup for it.

Requests of a batch continue from turn to turn, so a context starts slightly shorter than its nominal length and ends
slightly longer. Prefix caching is on, so that a longer context reuses the KV of a shorter one; timed prompts are always
new.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from vllm import LLM, SamplingParams

from benchmarks.engine.shapes import BATCHES, CONTEXTS, Shape, prompt_tokens
from benchmarks.engine.speed.contestant import ContestantConfig, StepTimer, StepTimes

_HALF_OF_STEPS = 40
"""Half of the steps of a shape over all turns: a context starts this many tokens shorter."""
_MAX_LENGTH = 2 * max(CONTEXTS)
_FIRST_NEW_SEED = 1_000


class Vllm:
    def __init__(self, config: ContestantConfig) -> None:
        model = LLM(
            model=config.folder,
            dtype=config.dtype,
            max_model_len=_MAX_LENGTH,
            max_num_seqs=max(BATCHES),
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
        )
        self._engine = model.llm_engine
        self._vocab_size = self._engine.model_config.get_vocab_size()
        self._names = itertools.count()
        self._new_seeds = itertools.count(_FIRST_NEW_SEED)
        self._alive: list[str] = []

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        self._add(prompt, count)
        while True:
            for output in self._engine.step():
                if output.finished:
                    return list(output.outputs[0].token_ids)

    def prepare(self, shape: Shape) -> None:
        self._engine.abort_request(self._alive, internal=True)
        self._alive = []
        if shape.prompt is not None:
            self.run(shape, 1)
            return
        length = shape.context - _HALF_OF_STEPS
        prompts = [prompt_tokens(row, length, self._vocab_size) for row in range(shape.batch)]
        self._alive = [self._add(prompt, _MAX_LENGTH - length) for prompt in prompts]
        while self._step() < shape.batch:
            pass
        self.run(shape, 2)

    def run(self, shape: Shape, steps: int) -> StepTimes:
        if shape.prompt is not None:
            return self._prefill(shape.prompt)
        watch = StepTimer()
        for _ in range(steps):
            watch.step(self._step())
        return watch.done()

    def _prefill(self, length: int) -> StepTimes:
        prompt = prompt_tokens(next(self._new_seeds), length, self._vocab_size)
        watch = StepTimer()
        self._add(prompt, 1)
        tokens = 0
        while tokens == 0:
            tokens = self._step()
        watch.step(tokens)
        return watch.done()

    def _step(self) -> int:
        """Runs one step; returns its number of tokens, one per output."""
        return len(self._engine.step())

    def _add(self, prompt: Sequence[int], count: int) -> str:
        """Adds a request; returns its internal id."""
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        given = f"request-{next(self._names)}"
        name: str = self._engine.add_request(given, {"prompt_token_ids": list(prompt)}, params)
        return name


make = Vllm
