"""Checks decode steps: captured ones give the logits of steps without a graph, steps ahead give the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.random_models import BLOCK_SIZE, Loaded, load, one_slice
from benchmarks.gpu_check.report import Row, at_most, guarded
from moonserve.engine.cuda.graphs import CudaCapture, GraphedModel, Replay
from moonserve.engine.engine import Engine
from moonserve.engine.kernels import Span, Step
from moonserve.engine.model.batch import Sampled, Slice

_BOUND = 1e-3
"""Largest relative difference of logits: products of a padded batch may be summed in another order."""


def graph_replays(bench: CheckContext) -> Iterator[Row]:
    name = "decode by CUDA graph: logits of the step without one"
    yield guarded(name, partial(_compare_graphs, bench=bench))


def _compare_graphs(name: str, bench: CheckContext) -> Row:
    capture = CudaCapture(bench.device) if bench.device.type == "cuda" else _again
    rehearses = bench.rehearses
    shape, batches = ("tiny", (1, 3)) if rehearses else ("1B", (1, 3, 8, 20))
    blocks = 8
    loaded = load(shape, "float32", max(batches) * blocks, bench.device)
    for piece in (*loaded.pool.keys, *loaded.pool.values):
        piece.normal_()
    graphed = GraphedModel(loaded.model, loaded.engine.config, loaded.pool, capture)
    worst = 0.0
    with torch.inference_mode():
        for batch in batches:
            for length in (1, BLOCK_SIZE, 3 * BLOCK_SIZE + 5):
                step = _step(batch, length, blocks)
                expected = loaded.model.forward(step).clone()
                error = (graphed.forward(step) - expected).norm() / expected.norm()
                worst = max(worst, float(error)) if error == error else float("nan")
    found = f"difference {worst:.1e}, batches of {', '.join(map(str, batches))}"
    return at_most(name, worst, _BOUND, found, f"≤ {_BOUND:.0e}")


def _again(work: Callable[[], torch.Tensor]) -> Replay:
    """Replaces capture without a GPU: a replay runs the work itself."""
    return work


def _step(batch: int, length: int, blocks: int) -> Step:
    """Returns a decode step of `batch` sequences with slightly different lengths, at most `length` tokens."""
    tables = torch.randperm(batch * blocks).view(batch, blocks)
    ends = [max(1, length - row) for row in range(batch)]
    last = torch.tensor([end - 1 for end in ends])
    slots = tables[torch.arange(batch), last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
    spans = [
        Span(end - 1, end, table[: -(-end // BLOCK_SIZE)].numpy(), end - 1)
        for end, table in zip(ends, tables, strict=True)
    ]
    return Step(
        token_ids=torch.arange(batch) % 251,
        positions=last,
        longest=max(ends),
        slots=slots,
        spans=spans,
        rows=None,
    )


# Checks decode steps that start while the previous step runs: the same tokens, and the speed-up over sequential steps.
# Sequences are short, because the host's work for a step does not grow with them.

AHEAD_BAR = 1.0
"""Least ratio of the time of sequential steps to the time of steps that run ahead."""


def steps_ahead(bench: CheckContext) -> Iterator[Row]:
    rehearses = bench.rehearses
    # Triton's interpreter cannot multiply bfloat16.
    shape, dtype = ("tiny", "float32") if rehearses else ("1B", "bfloat16")
    batches, steps = ((1,), 2) if rehearses else ((1, 8), 64)
    per_row = -(-(BLOCK_SIZE + steps) // BLOCK_SIZE)
    loaded = load(shape, dtype, max(batches) * per_row, bench.device)
    for batch in batches:
        name = f"decode steps that run ahead, batch {batch}"
        yield guarded(name, partial(_compare_ahead, loaded=loaded, batch=batch, steps=steps))


def _compare_ahead(name: str, loaded: Loaded, batch: int, steps: int) -> Row:
    taken: dict[bool, float] = {}
    said: dict[bool, list[list[int]]] = {}
    on_gpu = loaded.pool.device.type == "cuda"
    for runs_ahead in (False, True) * (2 if on_gpu else 1):  # on a GPU, the first two runs capture and compile
        run = _DecodeRun.of(loaded.engine, batch, steps)
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
class _DecodeRun:
    """Sequences with computed prompts, and their tokens so far."""

    engine: Engine
    blocks: list[range] = field(default_factory=list)
    histories: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine, batch: int, steps: int) -> _DecodeRun:
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
            piece.end, piece.token_from_previous_step = len(tokens) + follows, follows
            slices.append(piece)
        return slices

    def _append(self, sampled: Sequence[Sampled | None]) -> None:
        for history, one in zip(self.histories, sampled, strict=True):
            if one is None:
                raise RuntimeError("a step that samples gave no token")
            history.append(one.token_id)
