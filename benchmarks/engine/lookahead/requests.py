"""Requests from a trace or from random distributions. Only the replay knows their lengths in advance.

`max_tokens` is random too: 2,048 or 4,096, as most clients send, or four times the output, as if the client had
measured; never less than the output. Equal seeds give equal loads.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from moonserve.traces.format import read_trace

LIMITS = (2048, 4096)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request as it arrives at a decode worker, with its prompt computed and its first token generated."""

    arrived_s: float
    prompt: int
    output: int  # total tokens, at least two
    limit: int
    tenant: str = ""

    @property
    def stopped(self) -> bool:
        return self.output >= self.limit


def limit_of(output: int, draw: random.Random) -> int:
    """Returns a random `max_tokens` for a request that will generate `output` tokens."""
    return max(draw.choice((*LIMITS, 4 * output)), output)


def trace_requests(path: Path, limit: int | None = None, seed: int = 0) -> list[LoadRequest]:
    """Returns the requests of a trace that reach a decode worker (more than one token), at their arrival times."""
    draw = random.Random(seed)
    return [
        LoadRequest(r.arrived_s, r.input_length, r.output_length, limit_of(r.output_length, draw), r.tenant)
        for r in read_trace(path, limit)
        if r.output_length > 1
    ]  # fmt: skip


Lengths = Callable[[random.Random, float], tuple[int, int, str]]
"""Draws (prompt, output, tenant) of a request. The second argument is the share of the load before it (0 … 1)."""


def _lognormal(draw: random.Random, median: float, sigma: float, most: int) -> int:
    return min(max(round(median * draw.lognormvariate(0.0, sigma)), 2), most)


def chat(draw: random.Random, done: float) -> tuple[int, int, str]:
    """Prompts of some hundred tokens, with answers of similar length."""
    return _lognormal(draw, 500, 1.0, 16_384), _lognormal(draw, 250, 0.9, 4096), ""


def documents(draw: random.Random, done: float) -> tuple[int, int, str]:
    """Long prompts and short answers: a preempted sequence is expensive to recompute."""
    return _lognormal(draw, 8000, 1.0, 120_000), _lognormal(draw, 250, 0.8, 2048), ""


def reasoning(draw: random.Random, done: float) -> tuple[int, int, str]:
    """Short prompts and long answers with a long tail: almost all of a sequence is generated."""
    return _lognormal(draw, 200, 0.7, 4096), _lognormal(draw, 1200, 0.9, 4096), ""


def drifting(draw: random.Random, done: float) -> tuple[int, int, str]:
    """Answers that suddenly become four times as long in the middle of the load."""
    return _lognormal(draw, 400, 0.8, 8192), _lognormal(draw, 150 if done < 0.5 else 600, 0.7, 4096), ""  # fmt: skip


def tenants(draw: random.Random, done: float) -> tuple[int, int, str]:
    """Three tenants with equal prompts and different lengths of answers."""
    name, median = draw.choice((("labels", 8), ("chat", 250), ("writers", 1500)))
    return _lognormal(draw, 800, 0.8, 16_384), _lognormal(draw, median, 0.5, 4096), name


SYNTHETIC: dict[str, Lengths] = {each.__name__: each for each in (chat, documents, reasoning, drifting, tenants)}


def synthetic_requests(lengths: Lengths, count: int, per_s: float, seed: int) -> list[LoadRequest]:
    """Returns `count` requests of a Poisson process with `per_s` arrivals per second."""
    return list(_draw_requests(lengths, count, per_s, seed))


def _draw_requests(lengths: Lengths, count: int, per_s: float, seed: int) -> Iterator[LoadRequest]:
    draw = random.Random(f"{seed}")
    at = 0.0
    for number in range(count):
        at += draw.expovariate(per_s)
        prompt, output, tenant = lengths(draw, number / count)
        yield LoadRequest(at, prompt, output, limit_of(output, draw), tenant)
