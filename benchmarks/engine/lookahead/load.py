"""Requests whose lengths are known to the replay and to nobody else: of a trace, or drawn.

What clients allow (`max_tokens`) is drawn too: 2,048 or 4,096, as most send, or four times what will come, as if
somebody had measured; never less than what comes. Equal seeds give equal loads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from traces.format import read_trace

LIMITS = (2048, 4096)


@dataclass(frozen=True, slots=True)
class Wish:
    """One request as it comes to a decode worker: its prompt is there, and the first of its tokens."""

    arrived_s: float
    prompt: int
    output: int  # tokens in all, two at least
    limit: int
    tenant: str = ""

    @property
    def stopped(self) -> bool:
        return self.output >= self.limit


def limit_of(output: int, draw: random.Random) -> int:
    """`max_tokens` of a request that will generate so many."""
    return max(draw.choice((*LIMITS, 4 * output)), output)


def of_trace(path: Path, limit: int | None = None, seed: int = 0) -> list[Wish]:
    """Those of the trace that reach a decode worker, at their instants."""
    draw = random.Random(seed)
    return [
        Wish(each.arrived_s, each.input_length, each.output_length, limit_of(each.output_length, draw), each.tenant)
        for each in read_trace(path, limit)
        if each.output_length > 1
    ]  # fmt: skip


Lengths = Callable[[random.Random, float], tuple[int, int, str]]
"""(prompt, output, tenant) of a request, by how much of the load came before it (0 … 1)."""


def _lognormal(draw: random.Random, median: float, sigma: float, most: int) -> int:
    return min(max(round(median * draw.lognormvariate(0.0, sigma)), 2), most)


def chat(draw: random.Random, done: float) -> tuple[int, int, str]:
    """Prompts of some hundred tokens, answers about as long."""
    return _lognormal(draw, 500, 1.0, 16_384), _lognormal(draw, 250, 0.9, 4096), ""


def documents(draw: random.Random, done: float) -> tuple[int, int, str]:
    """Long prompts and short answers: what gives way is dear to compute again."""
    return _lognormal(draw, 8000, 1.0, 120_000), _lognormal(draw, 250, 0.8, 2048), ""


def reasoning(draw: random.Random, done: float) -> tuple[int, int, str]:
    """Short prompts and long answers with a long tail: almost all of a sequence grows here."""
    return _lognormal(draw, 200, 0.7, 4096), _lognormal(draw, 1200, 0.9, 4096), ""


def drifting(draw: random.Random, done: float) -> tuple[int, int, str]:
    """Answers become four times as long in the middle, all at once."""
    return _lognormal(draw, 400, 0.8, 8192), _lognormal(draw, 150 if done < 0.5 else 600, 0.7, 4096), ""  # fmt: skip


def tenants(draw: random.Random, done: float) -> tuple[int, int, str]:
    """Three of them, with prompts alike and answers that are not."""
    name, median = draw.choice((("labels", 8), ("chat", 250), ("writers", 1500)))
    return _lognormal(draw, 800, 0.8, 16_384), _lognormal(draw, median, 0.5, 4096), name


SYNTHETIC: dict[str, Lengths] = {each.__name__: each for each in (chat, documents, reasoning, drifting, tenants)}


def synthetic(lengths: Lengths, count: int, per_s: float, seed: int) -> list[Wish]:
    """`count` requests of a Poisson process."""
    return list(_synthetic(lengths, count, per_s, seed))


def _synthetic(lengths: Lengths, count: int, per_s: float, seed: int) -> Iterator[Wish]:
    draw = random.Random(f"{seed}")
    at = 0.0
    for number in range(count):
        at += draw.expovariate(per_s)
        prompt, output, tenant = lengths(draw, number / count)
        yield Wish(at, prompt, output, limit_of(output, draw), tenant)
