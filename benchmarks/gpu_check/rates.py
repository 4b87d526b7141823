"""Measures the speed of attention: decode against memory bandwidth, prefill against the rate of matrix products and
against torch's own attention, which needs contiguous K and V. One layer of an 8B model, bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.gpu_check.bench import Bench
from benchmarks.gpu_check.rows import Row, at_least, guarded

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 32
DECODE_BAR = 0.5
"""Least share of copy bandwidth if K and V are far larger than any cache. Not yet measured on a GPU."""
PREFILL_BAR = 0.25
"""Least share of the matrix product's rate for prompts of thousands of tokens. Not yet measured on a GPU."""
_LARGE_BYTES = 512 * 2**20
_LARGE_TOKENS = 2048


def decode(bench: Bench) -> Iterator[Row]:
    for rows, context in bench.scale.decode:
        name = f"decode attention, {rows} × {context:,} tokens"
        yield guarded(name, partial(_decode_row, bench=bench, rows=rows, context=context))


def prefill(bench: Bench) -> Iterator[Row]:
    for tokens, cached in bench.scale.prefill:
        behind = f" behind {cached:,}" if cached else ""
        name = f"prefill attention, {tokens:,} tokens{behind}"
        yield guarded(name, partial(_prefill_row, bench=bench, tokens=tokens, cached=cached))


def _decode_row(name: str, bench: Bench, rows: int, context: int) -> Row:
    from engine.cuda.kernels.decode import DecodeBatch, decode_attention, parts_for

    keys, values, tables = _pool(bench.device, rows, context)
    queries = _random(bench.device, rows, HEADS, HEAD_DIM)
    output = queries.new_empty(rows, HEADS * HEAD_DIM)
    ends = torch.full((rows,), context, dtype=torch.int32, device=bench.device)
    batch = DecodeBatch(tables, ends, parts_for(context, None))
    taken = bench.seconds(lambda: decode_attention(queries, keys, values, batch, None, output))
    read = rows * context * 2 * KV_HEADS * HEAD_DIM * keys.element_size()
    share = read / taken / bench.ceilings.copy_bytes_per_s
    bar = DECODE_BAR if read >= _LARGE_BYTES else 0.0
    found = f"{taken * 1e6:.0f} µs, {read / taken / 1e9:,.0f} GB/s, {share:.0%} of a copy"
    return at_least(name, share, bar, found, f"≥ {bar:.0%}" if bar else "")


def _prefill_row(name: str, bench: Bench, tokens: int, cached: int) -> Row:
    from engine.cuda.kernels.prefill import ChunkBatch, plan_tiles, prefill_attention, tiling_for

    keys, values, tables = _pool(bench.device, 1, cached + tokens)
    queries = _random(bench.device, tokens, HEADS, HEAD_DIM)
    output = queries.new_empty(tokens, HEADS * HEAD_DIM)
    group = HEADS // KV_HEADS
    per_tile = tiling_for(HEAD_DIM, keys.element_size(), group).tokens_per_tile(group)
    tiles = plan_tiles([(0, cached, cached + tokens)], per_tile)
    batch = ChunkBatch(tables, torch.from_numpy(tiles).to(bench.device))
    taken = bench.seconds(lambda: prefill_attention(queries, keys, values, batch, None, output))
    flops = 4 * HEADS * HEAD_DIM * (tokens * cached + tokens * (tokens + 1) // 2)
    share = flops / taken / bench.ceilings.flops_per_s
    bar = PREFILL_BAR if tokens >= _LARGE_TOKENS else 0.0
    found = f"{taken * 1e6:.0f} µs, {flops / taken / 1e12:.1f} TFLOP/s, {share:.0%} of a product"
    if cached == 0:
        found += f", {_torch_seconds(bench, queries) / taken:.2f}× torch's"
    return at_least(name, share, bar, found, f"≥ {bar:.0%}" if bar else "")


def _torch_seconds(bench: Bench, queries: torch.Tensor) -> float:
    own = queries.transpose(0, 1)[None]
    keys, values = (_random(bench.device, 1, KV_HEADS, queries.shape[0], HEAD_DIM) for _ in range(2))
    return bench.seconds(lambda: F.scaled_dot_product_attention(own, keys, values, is_causal=True, enable_gqa=True))


def _pool(device: torch.device, rows: int, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns K, V and scattered block tables of sequences of equal length."""
    per_row = -(-context // BLOCK_SIZE)
    shape = (rows * per_row, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    tables = torch.randperm(rows * per_row).view(rows, per_row).int().to(device)
    return _random(device, *shape), _random(device, *shape), tables


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)
