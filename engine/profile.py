"""How fast this engine is on this machine: what the conductor predicts times from.

A few timed steps, bounded in total, and a fit to the formulae of conductor.proto. Results are kept in a folder, by
model, processor and threads, so that only the first start of a worker pays. Knows nothing of schedulers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from engine.batch import Slice
from engine.engine import Engine
from protocol.ids import RequestId
from protocol.machine import processor
from protocol.pb.conductor_pb2 import DecodeProfile, PrefillProfile
from protocol.request import SamplingParams

_RUNS = 3
_PREFILL_TOKENS = (16, 64, 256, 512, 1024, 2048)
_DECODE_BATCHES = (1, 4, 16)
_DECODE_CONTEXTS = (32, 256, 1024)
_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)

Coefficients = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class _Point:
    """One measurement: seconds = c0 + c1·x1 + c2·x2."""

    x1: float
    x2: float
    seconds: float


def measure(
    engine: Engine, *, budget_s: float = 2.5, clock: Callable[[], float] = time.perf_counter
) -> tuple[PrefillProfile, DecodeProfile]:
    """Times steps on the engine, whose pool must not be in use: its contents are overwritten. Takes about `budget_s`
    seconds, more only when the very first points do."""
    deadline = clock() + budget_s
    prefill = _fit(_prefill_points(engine, clock, deadline - budget_s / 2))
    decode = _fit(_decode_points(engine, clock, deadline))
    return (
        PrefillProfile(c0=prefill[0], c1=prefill[1], c2=prefill[2]),
        DecodeProfile(c0=decode[0], c1=decode[1], c2=decode[2]),
    )


def measure_cached(engine: Engine, folder: Path) -> tuple[PrefillProfile, DecodeProfile]:
    """The measurement kept in `folder` for this engine on this machine, or a new one, kept there if it can be."""
    path = folder / f"{_identity(engine)}.json"
    kept = _read(path)
    if kept is None:
        kept = measure(engine)
        _write(path, kept)
    return kept


def _prefill_points(
    engine: Engine, clock: Callable[[], float], deadline: float
) -> Sequence[_Point]:
    points: list[_Point] = []
    for num_tokens in _PREFILL_TOKENS:
        if num_tokens > _longest(engine) or (len(points) >= 4 and clock() > deadline):
            break
        for cached in (0, num_tokens // 2):
            slices = [_slice(engine, 0, cached, num_tokens)]
            seconds = _time(engine, slices, clock)
            computed = num_tokens - cached
            points.append(_Point(computed, num_tokens**2 - cached**2, seconds))
    return points


def _decode_points(engine: Engine, clock: Callable[[], float], deadline: float) -> Sequence[_Point]:
    points: list[_Point] = []
    for context, batch in itertools.product(_DECODE_CONTEXTS, _DECODE_BATCHES):
        blocks = engine.layout.blocks_for(context) * batch
        if blocks > engine.num_blocks or context > _longest(engine):
            continue
        if len(points) >= 4 and clock() > deadline:
            break
        slices = [_slice(engine, row, context - 1, context) for row in range(batch)]
        points.append(_Point(batch, batch * context, _time(engine, slices, clock)))
    return points


def _longest(engine: Engine) -> int:
    return min(engine.num_blocks * engine.layout.block_size, engine.config.max_position_embeddings)


def _slice(engine: Engine, row: int, start: int, end: int) -> Slice:
    per_row = engine.layout.blocks_for(end)
    return Slice(
        request_id=RequestId(f"profile-{row}"),
        token_ids=[token % engine.config.vocab_size for token in range(end)],
        start=start,
        end=end,
        block_table=range(row * per_row, (row + 1) * per_row),
        sampling=_SAMPLING,
        num_prompt_tokens=end,
        samples=True,
    )


def _time(engine: Engine, slices: Sequence[Slice], clock: Callable[[], float]) -> float:
    engine.execute(slices)  # first calls compile and allocate
    times: list[float] = []
    for _ in range(_RUNS):
        started_at = clock()
        engine.execute(slices)
        times.append(clock() - started_at)
    return median(times)


# -- fitting


def _fit(points: Sequence[_Point]) -> Coefficients:
    """Least squares of the relative error with no coefficient below zero: a negative one would predict negative times
    somewhere. With three unknowns every set of non-zero ones can be tried."""
    seconds = np.array([point.seconds for point in points])
    columns = np.array([(1.0, point.x1, point.x2) for point in points]) / seconds[:, None]
    best, best_error = (0.0, 0.0, 0.0), float("inf")
    for count in (1, 2, 3):
        for active in itertools.combinations(range(3), count):
            solution = np.linalg.lstsq(columns[:, active], np.ones(len(points)), rcond=None)[0]
            error = float(np.sum((columns[:, active] @ solution - 1.0) ** 2))
            if (solution >= 0).all() and error < best_error:
                found = np.zeros(3)
                found[list(active)] = solution
                best, best_error = (float(found[0]), float(found[1]), float(found[2])), error
    return best


# -- keeping


def _identity(engine: Engine) -> str:
    parts = (
        engine.fingerprint,
        engine.attention_name,
        processor(),
        torch.get_num_threads(),
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _read(path: Path) -> tuple[PrefillProfile, DecodeProfile] | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return PrefillProfile(**kept["prefill"]), DecodeProfile(**kept["decode"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or damaged: it is measured again


def _write(path: Path, kept: tuple[PrefillProfile, DecodeProfile]) -> None:
    fields = [{"c0": one.c0, "c1": one.c1, "c2": one.c2} for one in kept]
    content = json.dumps({"prefill": fields[0], "decode": fields[1]}, indent=2)
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(content, encoding="utf-8")
        partial.replace(path)
    except OSError:
        return  # a read-only cache costs only the next start's measurement
