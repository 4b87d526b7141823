"""Measures the engine's speed on this machine, from which the conductor predicts times.

Times steps over a grid of shapes within a time budget, and fits the formulae of conductor.proto. A worker measures few
shapes at its first start. The result is kept in a folder, by model, processor and threads, for later starts.
`moonserve profile` measures many shapes. Knows nothing of schedulers.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from moonserve.engine.engine import Engine
from moonserve.engine.model.batch import Slice
from moonserve.protocol.pb.conductor_pb2 import DecodeProfile, PrefillProfile
from moonserve.protocol.process.machine import processor
from moonserve.protocol.request import RequestId, SamplingParams
from moonserve.protocol.step_time import fit_relative

_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)
_METHOD = 2  # version of the method; kept results of other versions are not used
_ENOUGH_POINTS = 4  # enough for three coefficients; measured whatever time they take

Clock = Callable[[], float]
_Steps = Sequence[Sequence[Slice]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeGrid:
    """Shapes to time, each `runs` times. Shapes that exceed the pool or the model's positions are skipped."""

    prompt_tokens: tuple[int, ...] = (16, 64, 256, 512, 1024, 2048)
    cached_shares: tuple[float, ...] = (0.0, 0.5)  # of the prompt
    batches: tuple[int, ...] = (1, 4, 16)
    contexts: tuple[int, ...] = (32, 256, 1024)  # tokens of each sequence
    runs: int = 3
    chunk_tokens: int | None = None  # None: compute a prompt in one step


START_GRID = ShapeGrid()
FINE_GRID = ShapeGrid(
    prompt_tokens=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    cached_shares=(0.0, 0.25, 0.5, 0.75, 0.95),
    batches=(1, 2, 4, 8, 16, 32, 64),
    contexts=(32, 128, 512, 1024, 2048, 4096),
    runs=3,
)


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Measured time of a prompt of `num_tokens`, of which `num_cached` were in the pool."""

    num_tokens: int
    num_cached: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Measured time of a decode step of `num_seqs` sequences with `context_tokens` in total."""

    num_seqs: int
    context_tokens: int
    seconds: float


def measure(
    engine: Engine,
    *,
    chunk_tokens: int,
    budget_s: float = 2.5,
    clock: Clock = time.perf_counter,
) -> tuple[PrefillProfile, DecodeProfile]:
    """Times prefill and decode steps and fits both profiles. Overwrites the pool, which must not be in use. Prompts run
    in chunks as they do in service: one long step is slower than several. Takes about `budget_s` seconds of `clock`;
    more only if the first few points need more."""
    deadline = clock() + budget_s
    grid = replace(START_GRID, chunk_tokens=chunk_tokens)
    prompts = prefill_points(engine, grid, clock, deadline - budget_s / 2)
    steps = decode_points(engine, START_GRID, clock, deadline)
    prefill = _fit(
        [(p.num_tokens - p.num_cached, p.num_tokens**2 - p.num_cached**2) for p in prompts],
        [p.seconds for p in prompts],
    )
    decode = _fit([(p.num_seqs, p.context_tokens) for p in steps], [p.seconds for p in steps])
    return PrefillProfile(**prefill), DecodeProfile(**decode)


def measure_cached(engine: Engine, folder: Path, *, chunk_tokens: int) -> tuple[PrefillProfile, DecodeProfile]:
    """Returns the measurement kept in `folder` for this engine and machine, or takes a new one and keeps it there if
    the folder is writable."""
    path = folder / f"{_identity(engine, chunk_tokens)}.json"
    kept = _read(path)
    if kept is None:
        # All workers of a host start and measure at the same time, so wall time would include the others' work. With a
        # GPU or several threads, processor time is meaningless.
        is_alone = torch.get_num_threads() == 1 and engine.rank_group is None and engine.device.type == "cpu"
        clock = time.process_time if is_alone else time.perf_counter
        kept = measure(engine, chunk_tokens=chunk_tokens, clock=clock)
        _write(path, kept)
    return kept


# -- measurement


def prefill_points(engine: Engine, grid: ShapeGrid, clock: Clock, deadline: float) -> Sequence[PrefillPoint]:
    """Times the prompts of the grid, shortest first, until `deadline` of `clock()`. Overwrites the pool."""
    shapes = [
        (num_tokens, min(int(num_tokens * share), num_tokens - 1))
        for num_tokens, share in itertools.product(grid.prompt_tokens, grid.cached_shares)
        if num_tokens <= _longest(engine)
    ]
    prompts = (list(_chunks(engine, p, n, grid.chunk_tokens)) for n, p in shapes)
    times = _time(engine, prompts, grid.runs, clock, deadline)
    return [PrefillPoint(*shape, seconds) for shape, seconds in zip(shapes, times, strict=False)]


def decode_points(engine: Engine, grid: ShapeGrid, clock: Clock, deadline: float) -> Sequence[DecodePoint]:
    """Times the decode steps of the grid, shortest contexts first, until `deadline`. Overwrites the pool."""
    shapes = [
        (batch, context)
        for context, batch in itertools.product(grid.contexts, grid.batches)
        if engine.layout.blocks_for(context) * batch <= engine.num_blocks and context <= _longest(engine)
    ]
    steps = ([[_slice(engine, row, c - 1, c, num_prompt_tokens=c - 1) for row in range(b)]] for b, c in shapes)
    times = _time(engine, steps, grid.runs, clock, deadline)
    return [DecodePoint(b, b * c, t) for (b, c), t in zip(shapes, times, strict=False)]


def _longest(engine: Engine) -> int:
    return min(engine.num_blocks * engine.layout.block_size, engine.config.max_position_embeddings)


def _chunks(engine: Engine, cached: int, num_tokens: int, chunk_tokens: int | None) -> Iterator[Sequence[Slice]]:
    """Yields the steps that a prefill worker runs for this prompt alone."""
    size = chunk_tokens or num_tokens
    for start in range(cached, num_tokens, size):
        end = min(start + size, num_tokens)
        yield [_slice(engine, 0, start, end, samples=end == num_tokens)]


def _slice(
    engine: Engine,
    row: int,
    start: int,
    end: int,
    *,
    samples: bool = True,
    num_prompt_tokens: int | None = None,
) -> Slice:
    """Creates a slice of a synthetic sequence. The prompt ends at `end` unless `num_prompt_tokens` is given."""
    per_row = engine.layout.blocks_for(end)
    return Slice(
        request_id=RequestId(f"profile-{row}"),
        token_ids=[token % engine.config.vocab_size for token in range(end)],
        start=start,
        end=end,
        block_table=range(row * per_row, (row + 1) * per_row),
        sampling=_SAMPLING,
        num_prompt_tokens=end if num_prompt_tokens is None else num_prompt_tokens,
        samples=samples,
    )


def _time(engine: Engine, works: Iterable[_Steps], runs: int, clock: Clock, deadline: float) -> Sequence[float]:
    """Returns the seconds that each of the first works takes, the median of `runs`. Runs of one work are far apart, so
    that a busy neighbour disturbs one run of each and not all runs of one. An unmeasured first run determines how many
    works there is time for."""
    share_s = (deadline - clock()) / (runs + 1)
    kept: list[_Steps] = []
    began = clock()
    for work in works:
        if len(kept) >= _ENOUGH_POINTS and clock() - began > share_s:
            break
        _execute(engine, work)  # a first call compiles and allocates
        kept.append(work)
    times: list[list[float]] = [[] for _ in kept]
    for _ in range(runs):
        for work, own in zip(kept, times, strict=True):
            started_at = clock()
            _execute(engine, work)
            own.append(clock() - started_at)
    return [median(own) for own in times]


def _execute(engine: Engine, steps: _Steps) -> None:
    for step in steps:
        engine.execute(step)


# -- fit


def _fit(variables: Sequence[tuple[int, int]], seconds: Sequence[float]) -> dict[str, float]:
    """Fits seconds = c0 + c1·x1 + c2·x2."""
    columns = np.array([(1.0, x1, x2) for x1, x2 in variables])
    found = fit_relative(columns, np.array(seconds))
    return {f"c{number}": float(value) for number, value in enumerate(found)}


# -- kept results


def _identity(engine: Engine, chunk_tokens: int) -> str:
    parts = (
        _METHOD,
        chunk_tokens,
        engine.fingerprint,
        engine.kernels_name,
        engine.attention_name,
        engine.layout.num_layers,  # a pipeline stage has only some of them
        processor(),
        torch.get_num_threads(),
        *(() if engine.device.type == "cpu" else (torch.cuda.get_device_name(engine.device),)),
        *(() if engine.rank_group is None else (engine.rank_group.shard.size,)),
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _read(path: Path) -> tuple[PrefillProfile, DecodeProfile] | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return PrefillProfile(**kept["prefill"]), DecodeProfile(**kept["decode"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or damaged: measure again


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
