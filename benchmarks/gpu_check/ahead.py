"""Checks decode steps that start while the previous step runs: the same tokens, and the speed-up over sequential steps.
Sequences are short, because the host's work for a step does not grow with them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.gpu_check.bench import REHEARSAL, Bench
from benchmarks.gpu_check.models import BLOCK_SIZE, Loaded, load, one_slice
from benchmarks.gpu_check.rows import Row, guarded
from engine.batch import Sampled, Slice
from engine.engine import Engine

AHEAD_BAR = 1.0
"""Least ratio of the time of sequential steps to the time of steps that run ahead. Not yet measured on a GPU."""


def decoding(bench: Bench) -> Iterator[Row]:
    rehearses = bench.scale is REHEARSAL
    # Triton's interpreter cannot multiply bfloat16.
    shape, dtype = ("tiny", "float32") if rehearses else ("1B", "bfloat16")
    batches, steps = ((1,), 2) if rehearses else ((1, 8), 64)
    per_row = -(-(BLOCK_SIZE + steps) // BLOCK_SIZE)
    loaded = load(shape, dtype, max(batches) * per_row, bench.device)
    for batch in batches:
        name = f"decode steps that run ahead, batch {batch}"
        yield guarded(name, partial(_compare, loaded=loaded, batch=batch, steps=steps))


def _compare(name: str, loaded: Loaded, batch: int, steps: int) -> Row:
    taken: dict[bool, float] = {}
    said: dict[bool, list[list[int]]] = {}
    on_gpu = loaded.pool.device.type == "cuda"
    for runs_ahead in (False, True) * (2 if on_gpu else 1):  # on a GPU, the first two runs capture and compile
        run = _Run.of(loaded.engine, batch, steps)
        began_at = time.perf_counter()
        run.decode_ahead(steps) if runs_ahead else run.decode(steps)
        taken[runs_ahead] = time.perf_counter() - began_at
        said[runs_ahead] = run.histories
    ratio, is_same = taken[False] / taken[True], said[False] == said[True]
    is_soon = ratio >= AHEAD_BAR or not on_gpu
    return Row(
        name=name,
        status="pass" if is_same and is_soon else "fail",
        found=f"{taken[True] / steps * 1e3:.2f} ms a step, {ratio:.2f}× as fast",
        asked="the same tokens" + (f", ≥ {AHEAD_BAR:.1f}×" if on_gpu else ""),
        reason="" if is_same and is_soon else "slower" if is_same else "tokens differ",
        figures={"seconds": taken[True], "ratio": ratio},
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Sequences with computed prompts, and their tokens so far."""

    engine: Engine
    blocks: list[range] = field(default_factory=list)
    histories: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine, batch: int, steps: int) -> _Run:
        per_row = -(-(BLOCK_SIZE + steps) // BLOCK_SIZE)
        run = cls(engine)
        for row in range(batch):
            run.blocks.append(range(row * per_row, (row + 1) * per_row))
            run.histories.append([(7 * row + n) % 251 for n in range(BLOCK_SIZE)])
        prompts = enumerate(zip(run.histories, run.blocks, strict=True))
        run._append(engine.execute([one_slice(row, tokens, 0, blocks) for row, (tokens, blocks) in prompts]))
        return run

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._append(self.engine.execute(self._slices()))

    def decode_ahead(self, steps: int) -> None:
        under_way = self.engine.begin(self._slices())
        for _ in range(steps - 1):
            behind = self.engine.begin(self._slices(follows=True))
            self._append(under_way.end())
            under_way = behind
        self._append(under_way.end())

    def _slices(self, *, follows: bool = False) -> list[Slice]:
        """Returns one token per sequence: the last one, or with `follows` the one that the running step will sample."""
        slices: list[Slice] = []
        for row, (tokens, blocks) in enumerate(zip(self.histories, self.blocks, strict=True)):
            piece = one_slice(row, tokens, len(tokens) - 1 + follows, blocks)
            piece.end, piece.follows = len(tokens) + follows, follows
            slices.append(piece)
        return slices

    def _append(self, sampled: Sequence[Sampled | None]) -> None:
        for history, one in zip(self.histories, sampled, strict=True):
            if one is None:
                raise RuntimeError("a step that samples gave no token")
            history.append(one.token_id)
