"""Speed of decode steps and prompts over quantised KV, in turns."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.generate import greedy_slice
from benchmarks.harness.measure import interleaved, median, table
from moonserve.engine.engine import Engine
from moonserve.engine.model.batch import Slice
from moonserve.engine.model.config import load_model_config
from moonserve.protocol.kv_blocks import QUANTISED_DTYPES
from moonserve.protocol.process.machine import cache_folder

_PREFILL, _CHUNK = 2048, 512
Shape = tuple[str, int, int]  # name, sequences (0: one prompt), tokens of each
SHAPES: tuple[Shape, ...] = (
    ("B1 C512", 1, 512),
    ("B8 C512", 8, 512),
    ("B1 C2048", 1, 2048),
    ("B8 C2048", 8, 2048),
    ("B32 C2048", 32, 2048),
    (f"prompt of {_PREFILL}", 0, _PREFILL),
)


def load(folder: Path, kv_dtype: str) -> Engine:
    config = load_model_config(folder)
    layout = config.kv_layout(32, "bfloat16", kv_dtype)
    num_blocks = max(max(1, batch) * layout.blocks_for(tokens) for _, batch, tokens in SHAPES)
    return Engine.load(
        folder,
        config=config,
        layout=layout,
        dtype="bfloat16",
        num_blocks=num_blocks,
        kernels="native",
        attention="native",
        cache_folder=cache_folder(os.environ, Path.home()),
    )


def seconds(engine: Engine, shape: Shape) -> float:
    """Returns the processor seconds of one decode step, or of a prompt in chunks."""
    _, batch, tokens = shape
    if batch:
        steps = [[_slice(engine, row, tokens - 1, tokens) for row in range(batch)]] * 5
    else:
        cuts = range(0, tokens, _CHUNK)
        steps = [[_slice(engine, 0, first, first + _CHUNK)] for first in cuts]
    began = time.process_time()
    for step in steps:
        engine.execute(step)
    return (time.process_time() - began) / (len(steps) if batch else 1)


def _slice(engine: Engine, row: int, start: int, end: int) -> Slice:
    per_row = engine.layout.blocks_for(end)
    tokens = [token % engine.config.vocab_size for token in range(end)]
    blocks = range(row * per_row, (row + 1) * per_row)
    is_output = end == start + 1  # attention treats the last token of a prompt otherwise
    return greedy_slice(f"row-{row}", tokens, start, end, blocks, num_prompt_tokens=start if is_output else None)


def speeds(model: str, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Returns one row of figures per KV dtype."""
    engines = {name: load(folder, name) for name in ("bfloat16", *QUANTISED_DTYPES[::-1])}
    for engine in engines.values():
        for shape in SHAPES:  # fills the blocks and warms up
            seconds(engine, shape)
    times: dict[tuple[str, Shape], list[float]] = {}
    for name, shape in interleaved(list(engines), SHAPES, rounds):
        times.setdefault((name, shape), []).append(seconds(engines[name], shape))
    return [
        {
            "model": model,
            "kv": name,
            "bytes_per_token": engine.layout.block_bytes // engine.layout.block_size,
            "seconds": {shape[0]: median(times[name, shape]) for shape in SHAPES},
        }
        for name, engine in engines.items()
    ]


def speed_table(rows: Sequence[dict[str, Any]]) -> str:
    names = [name for name, _, _ in SHAPES]
    headers = ["", "KV", "bytes per token", *names[:-1], f"{names[-1]}, tokens/s"]
    cells = [
        [
            row["model"],
            row["kv"],
            f"{row['bytes_per_token']:,}",
            *(f"{1000 * row['seconds'][name]:.2f}" for name in names[:-1]),
            f"{_PREFILL / row['seconds'][names[-1]]:,.0f}",
        ]
        for row in rows
    ]
    return table(headers, cells)
