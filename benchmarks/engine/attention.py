"""`python -m benchmarks.engine.attention`: times attention alone, in ms per layer, against torch and a lower bound.

The lower bound ("floor") of a decode step is the time to read its K and V once. For a prompt it is the time of its
scores and sums at the rate of a large matrix product. Both rates are measured in the same run. The layers' K and V
together exceed the caches, and their blocks are in random order. Contestants take turns; figures are medians. With one
thread, processor time is measured, because other load hardly changes it; with more threads, wall time.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine.roofline import read_bytes_per_s
from benchmarks.harness.measure import median, table, write_json
from moonserve.engine.engine import set_threads
from moonserve.engine.kernels import Attention, Geometry, Span
from moonserve.engine.kernels.selector import make_attention
from moonserve.engine.kv_cache.tensors import TORCH_DTYPES, KvTensors
from moonserve.protocol.kv_blocks import KvLayout
from moonserve.protocol.process.native_libraries import shared_cache

CONTESTANTS = ("native", "torch")
BLOCK_SIZE = 32
_POOL_BYTES = 192 << 20  # several times the last-level cache
_MAX_LAYERS = 48
_GEMM_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Attention of one step in one layer."""

    label: str
    geometry: Geometry
    lengths: Sequence[tuple[int, int]]  # (start, end) of each span

    @property
    def num_tokens(self) -> int:
        return sum(end - start for start, end in self.lengths)

    @property
    def kv_elements(self) -> int:
        """Number of elements of K and V, with each token of a sequence counted once."""
        per_token = 2 * self.geometry.num_kv_heads * self.geometry.head_dim
        return per_token * sum(end for _, end in self.lengths)

    @property
    def flops(self) -> int:
        """Floating-point operations of scores and sums, without masked pairs."""
        pairs = sum((end * (end + 1) - start * (start + 1)) // 2 for start, end in self.lengths)
        return 4 * self.geometry.num_heads * self.geometry.head_dim * pairs


SMALL = Geometry(num_heads=12, num_kv_heads=4, head_dim=64)  # the 110M Llama in `shapes`
LARGE = Geometry(num_heads=32, num_kv_heads=8, head_dim=128)  # as in Llama 3 8B


def decode(batch: int, context: int, geometry: Geometry = SMALL, suffix: str = "") -> Work:
    lengths = [(context - 1, context)] * batch
    return Work(label=f"decode B{batch} C{context}{suffix}", geometry=geometry, lengths=lengths)


def prompts(label: str, *lengths: tuple[int, int], geometry: Geometry = SMALL) -> Work:
    return Work(label=label, geometry=geometry, lengths=lengths)


DECODES = [
    *(decode(batch, context) for context in (512, 2048) for batch in (1, 8, 32)),
    decode(8, 1024, LARGE, ", 8B-shaped"),
]
PROMPTS = [
    prompts("prompt of 512", (0, 512)),
    prompts("prompt of 2,048", (0, 2048)),
    prompts("chunk of 512 behind 1,536", (1536, 2048)),
    prompts("chunk of 512 behind 7,680", (7680, 8192)),
    prompts("4 prompts of 128", *[(0, 128)] * 4),
    prompts("chunk of 512 behind 512, 8B-shaped", (512, 1024), geometry=LARGE),
]


class AttentionBench:
    """A pool with several layers of random K and V, and the contestants that read it."""

    def __init__(self, work: Work, dtype: str) -> None:
        self._work = work
        geometry = work.geometry
        blocks = [-(-end // BLOCK_SIZE) for _, end in work.lengths]
        one = self._layout(1, dtype).pool_bytes(sum(blocks))
        layout = self._layout(max(2, min(_MAX_LAYERS, _POOL_BYTES // one)), dtype)
        self._pool = KvTensors(layout, sum(blocks))
        generator = torch.Generator().manual_seed(0)
        for piece in (*self._pool.keys, *self._pool.values):
            piece.copy_(torch.randn(piece.shape[1:], generator=generator).expand(piece.shape))
        order = np.random.default_rng(0).permutation(sum(blocks))
        ends = np.cumsum(blocks)
        self._spans = [
            Span(start, stop, order[end - count : end], start if stop - start == 1 else stop)
            for (start, stop), count, end in zip(work.lengths, blocks, ends, strict=True)
        ]
        heads = geometry.num_heads + 2 * geometry.num_kv_heads
        shape = (work.num_tokens, heads, geometry.head_dim)
        wide = torch.randn(shape, generator=generator).to(TORCH_DTYPES[dtype])
        first = geometry.num_heads
        self._tensors = wide[:, :first], wide[:, first : -geometry.num_kv_heads]
        self._values = wide[:, -geometry.num_kv_heads :]
        # Prompts are not bound by memory, so two layers are enough.
        self._layers = range(layout.num_layers if work.num_tokens == len(work.lengths) else 2)

    def _layout(self, num_layers: int, dtype: str) -> KvLayout:
        geometry = self._work.geometry
        return KvLayout(
            num_layers=num_layers,
            block_size=BLOCK_SIZE,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            dtype=dtype,
        )

    def measure(self, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
        """Returns the seconds per layer of each contestant, one figure per round."""
        backends = {name: make_attention(name, self._work.geometry, self._pool, shared_cache()) for name in CONTESTANTS}
        plans = {name: one.plan(self._spans, None) for name, one in backends.items()}
        seconds: dict[str, list[float]] = {name: [] for name in backends}
        for number in range(rounds + 1):
            for name, backend in backends.items():
                taken = self._pass(backend, plans[name], clock)
                if number > 0:  # the first round warms up
                    seconds[name].append(taken)
        return seconds

    def _pass(self, backend: Attention, plan: Any, clock: Callable[[], float]) -> float:
        queries, keys = self._tensors
        begin = clock()
        for layer in self._layers:
            backend.attend(layer, plan, queries, keys, self._values)
        return (clock() - begin) / len(self._layers)


def gemm_flops_per_s(dtype: str, clock: Callable[[], float]) -> float:
    """Returns the rate of a large matrix product: the best of several rounds."""
    left, right = torch.randn(2, _GEMM_ROWS, _GEMM_ROWS).to(TORCH_DTYPES[dtype])
    times = []
    for _ in range(7):
        begin = clock()
        left @ right
        times.append(clock() - begin)
    return 2 * _GEMM_ROWS**3 / min(times)


def run(works: Sequence[Work], dtypes: Sequence[str], rounds: int, threads: int) -> dict[str, Any]:
    set_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    bytes_per_s = read_bytes_per_s()
    flops_per_s = {dtype: gemm_flops_per_s(dtype, clock) for dtype in dtypes}
    rows = []
    with torch.inference_mode():
        for dtype in dtypes:
            for work in works:
                seconds = AttentionBench(work, dtype).measure(rounds, clock)
                rows.append(_row(work, dtype, seconds, bytes_per_s, flops_per_s[dtype]))
    return {
        "threads": threads,
        "rounds": rounds,
        "bytes_per_s": bytes_per_s,
        "flops_per_s": flops_per_s,
        "rows": rows,
    }


def _row(
    work: Work,
    dtype: str,
    seconds: dict[str, list[float]],
    bytes_per_s: float,
    flops_per_s: float,
) -> dict[str, Any]:
    ms = {name: median(values) * 1e3 for name, values in seconds.items()}
    kv_bytes = work.kv_elements * TORCH_DTYPES[dtype].itemsize
    floor_ms = max(kv_bytes / bytes_per_s, work.flops / flops_per_s) * 1e3
    return {
        "work": work.label,
        "dtype": dtype,
        **{f"{name}_ms": value for name, value in ms.items()},
        "speedup": ms["torch"] / ms["native"],
        "floor_ms": floor_ms,
        "share_of_floor": floor_ms / ms["native"],
        "native_gb_per_s": kv_bytes / ms["native"] / 1e6,
        "native_gflop_per_s": work.flops / ms["native"] / 1e6,
    }


def report(result: dict[str, Any]) -> str:
    rates = ", ".join(f"{dtype} products {rate / 1e9:.0f} GFLOP/s" for dtype, rate in result["flops_per_s"].items())
    head = (
        f"{result['threads']} thread(s), medians of {result['rounds']}, ms per layer; "
        f"memory {result['bytes_per_s'] / 1e9:.1f} GB/s on one core, {rates}"
    )
    rows = [
        [
            row["work"],
            row["dtype"],
            f"{row['native_ms']:.3f}",
            f"{row['torch_ms']:.3f}",
            f"{row['speedup']:.1f}×",
            f"{row['floor_ms']:.3f}",
            f"{row['share_of_floor']:.2f}",
            f"{row['native_gb_per_s']:.1f}",
            f"{row['native_gflop_per_s']:.0f}",
        ]
        for row in result["rows"]
    ]
    columns = ("", "dtype", "native", "torch", "torch ÷ native", "floor", "floor ÷ native")
    return f"{head}\n\n{table((*columns, 'GB/s', 'GFLOP/s'), rows)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.attention", description=__doc__)
    parser.add_argument("--only", choices=("decode", "prefill"), help="default: both")
    parser.add_argument("--dtypes", nargs="+", choices=TORCH_DTYPES, default=list(TORCH_DTYPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7, help="at least 5 for a claim")
    parser.add_argument("--json", type=Path, default=Path("out/engine/attention.json"))
    arguments = parser.parse_args()
    works = {"decode": DECODES, "prefill": PROMPTS, None: [*DECODES, *PROMPTS]}[arguments.only]
    result = run(works, arguments.dtypes, arguments.rounds, arguments.threads)
    print(report(result))
    write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
