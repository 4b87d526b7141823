"""Checks that captured decode steps give the logits of steps without a graph, over batch sizes and lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_check.bench import REHEARSAL, Bench
from benchmarks.gpu_check.models import BLOCK_SIZE, load
from benchmarks.gpu_check.rows import Row, at_most, guarded
from engine.attention.base import Span
from engine.cuda.graphs import CudaCapture, GraphedModel, Replay
from engine.step import Step

_BOUND = 1e-3
"""Largest relative difference of logits: products of a padded batch may be summed in another order."""


def replays(bench: Bench) -> Iterator[Row]:
    name = "decode by CUDA graph: logits of the step without one"
    yield guarded(name, partial(_compare, bench=bench))


def _compare(name: str, bench: Bench) -> Row:
    capture = CudaCapture(bench.device) if bench.device.type == "cuda" else _again
    rehearses = bench.scale is REHEARSAL
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
