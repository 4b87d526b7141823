"""Measures a started vLLM engine, from which the conductor predicts times (`PrefillProfile`, `DecodeProfile`).

It times whole requests, where `engine.speed_profile` times steps of the own engine, with random prompts that no cache
has.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import numpy as np

from moonserve.protocol.pb.conductor_pb2 import DecodeProfile, PrefillProfile
from moonserve.protocol.request import GatewayId, Request, RequestId, SamplingParams
from moonserve.protocol.step_time import fit_relative
from moonserve.vllm.serving.service import Engine
from moonserve.vllm.serving.state import Generate

_PROMPTS = (16, 128, 512, 1024, 2048)
_BATCHES = ((1, 32), (1, 512), (8, 32), (8, 256))  # sequences, tokens of each one's prompt
_STEPS = 8
_BUDGET_S = 4.0  # for prompts, and again for steps; the first two shapes are measured whatever time they take
_ENOUGH = 2


async def measure(engine: Engine) -> tuple[PrefillProfile, DecodeProfile]:
    """Returns the speed of an engine that nobody else uses. Its prefix cache is empty afterwards."""
    meter = _Meter(engine)
    await meter.first_and_last_token_s(16, _STEPS)  # warms up
    longest = engine.facts.max_model_len - _STEPS - 1
    prompts: list[tuple[float, float, float]] = []  # tokens, tokens², seconds
    deadline = time.monotonic() + _BUDGET_S
    for num_tokens in sorted({min(each, longest) for each in _PROMPTS}):
        if len(prompts) < _ENOUGH or time.monotonic() < deadline:
            first_s, _ = await meter.first_and_last_token_s(num_tokens, 1)
            prompts.append((num_tokens, num_tokens**2, first_s))
    steps: list[tuple[float, float, float]] = []  # sequences, tokens of context, seconds
    deadline = time.monotonic() + _BUDGET_S
    for batch, num_tokens in _BATCHES:
        if num_tokens <= longest and (len(steps) < _ENOUGH or time.monotonic() < deadline):
            runs = [meter.first_and_last_token_s(num_tokens, _STEPS) for _ in range(batch)]
            times = await asyncio.gather(*runs)
            began, ended = max(first for first, _ in times), max(last for _, last in times)
            steps.append((batch, batch * num_tokens, max(1e-6, ended - began) / (_STEPS - 1)))
    await engine.reset_prefix_cache()
    return PrefillProfile(**_fit(prompts)), DecodeProfile(**_fit(steps))


class _Meter:
    """Source of random prompts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._random = random.Random()  # not those of another worker, which the store may have
        self._vocab_size = engine.facts.vocab_size
        self._number = 0

    async def first_and_last_token_s(self, num_prompt_tokens: int, num_tokens: int) -> tuple[float, float]:
        """Returns the seconds to the first and to the last of `num_tokens` tokens."""
        self._number += 1
        request = Request(
            request_id=RequestId(f"measurement-{self._number}"),
            gateway_id=GatewayId(""),
            token_ids=tuple(self._random.randrange(self._vocab_size) for _ in range(num_prompt_tokens)),
            num_prompt_tokens=num_prompt_tokens,
            block_keys=(),
            sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0),
        )
        began_at = time.monotonic()
        times = [time.monotonic() - began_at async for _ in self._engine.generate(Generate(request=request))]
        return times[0], times[-1]


def _fit(points: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    """Fits seconds = c0 + c1·x1 + c2·x2."""
    columns = np.array([(1.0, x1, x2) for x1, x2, _ in points])
    found = fit_relative(columns, np.array([seconds for _, _, seconds in points]))
    return {f"c{number}": float(value) for number, value in enumerate(found)}
