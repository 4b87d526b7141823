"""Paged decode attention, split over the context: one token per sequence, many programs per sequence.

There are two kernels. In `_attend_part`, one program per (sequence, KV head, part of the context) reads its K and V
once for the whole group of query heads and writes a partial softmax. `_join_parts` combines the parts (Flash-Decoding).
The size of a part depends on its sequence alone, so a sequence's result has the same bits in any batch. Lengths are
read on the device, so a captured graph stays valid while sequences grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.cuda.kernels.tiles import LOG2_E, fold, load_tokens, token_offsets

PART = 256
"""Least tokens of a part: with fewer, writing and reading its result costs over 3 % of reading its K and V."""
MAX_PARTS = 32
"""Most parts of a sequence, which bounds the memory of partial results. Longer sequences have longer parts."""


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Single tokens: the first rows of a step."""

    tables: torch.Tensor  # [rows, blocks] int32: block tables from each sequence's beginning
    # [rows] int32: length of each sequence including this token; 0 = padding, whose output is 0.
    ends: torch.Tensor
    num_parts: int  # at least the parts of the longest sequence


def parts_for(num_tokens: int, window: int | None) -> int:
    """Returns an upper bound of the parts into which the kernels split a sequence of `num_tokens`."""
    seen = num_tokens if window is None else min(num_tokens, window)
    return min(-(-seen // PART), MAX_PARTS)


def decode_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: DecodeBatch,
    window: int | None,
    output: torch.Tensor,
) -> None:
    """Computes decode attention for the first rows of queries [tokens, heads, head_dim] over a layer's keys and values
    [blocks, block_size, kv_heads, head_dim], into the same rows of output [tokens, heads · head_dim]. The heads of a
    token are adjacent, output is contiguous. Scores are scaled by head_dim^-½."""
    heads, head_dim = queries.shape[1:]
    rows = batch.ends.shape[0]
    block_size, kv_heads = keys.shape[1:3]
    parts = batch.num_parts
    unfinished = queries.new_empty((rows, heads, parts, head_dim), dtype=torch.float32)
    bests = queries.new_empty((rows, heads, parts), dtype=torch.float32)
    totals = torch.empty_like(bests)
    columns = max(16, triton.next_power_of_2(head_dim))
    tile = _tile_tokens(columns, keys.element_size())
    _attend_part[(rows, kv_heads, parts)](
        queries, keys, values, batch.tables, batch.ends, unfinished, bests, totals,
        queries.stride(0), batch.tables.stride(0), kv_heads * head_dim, parts,
        head_dim**-0.5 * LOG2_E,
        WINDOW=window, BLOCK_SIZE=block_size, GROUP=heads // kv_heads,
        GROUP_ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        HEAD_DIM=head_dim, HEAD_COLUMNS=columns, TILE=tile, LEAST=PART, MOST=MAX_PARTS,
        num_warps=4, num_stages=2 if keys.element_size() == 2 else 1,
    )  # fmt: skip
    _join_parts[(rows, heads)](
        unfinished, bests, totals, batch.ends, output, parts,
        WINDOW=window, PARTS=triton.next_power_of_2(parts), HEAD_DIM=head_dim,
        HEAD_COLUMNS=columns, TILE=tile, LEAST=PART, MOST=MAX_PARTS, num_warps=4,
    )  # fmt: skip


def _tile_tokens(columns: int, element_bytes: int) -> int:
    """Returns the number of tokens read at a time: about 16 KiB of K, a power of two that divides PART."""
    return max(16, min(64, 16384 // (columns * element_bytes)))


@triton.jit
def _visible_part(
    end: tl.tensor,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
) -> tl.tensor:
    """Returns (oldest token in the context, tokens per part); the latter is a multiple of TILE."""
    oldest = end * 0
    if WINDOW is not None:
        oldest = tl.maximum(end - WINDOW, 0)
    size = tl.cdiv(tl.cdiv(end - oldest, MOST), TILE) * TILE
    return oldest, tl.maximum(size, LEAST)


@triton.jit(do_not_specialize=["num_parts"])
def _attend_part(
    queries: tl.tensor, keys: tl.tensor, values: tl.tensor, tables: tl.tensor, ends: tl.tensor,
    unfinished: tl.tensor, bests: tl.tensor, totals: tl.tensor, query_stride: tl.tensor,
    table_stride: tl.tensor, token_stride: tl.tensor, num_parts: tl.tensor, scale: tl.tensor,
    WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr, TILE: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    end = tl.load(ends + row)
    oldest, size = _visible_part(end, WINDOW, TILE, LEAST, MOST)
    begin = oldest + part * size
    if begin >= end:
        return
    stop = tl.minimum(begin + size, end)
    members = tl.arange(0, GROUP_ROWS)
    columns = tl.arange(0, HEAD_COLUMNS)
    heads = kv_head * GROUP + members
    inside = (members < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    places = row * query_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    group = tl.load(queries + places, mask=inside, other=0.0)
    best = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    output = tl.zeros([GROUP_ROWS, HEAD_COLUMNS], tl.float32)
    table = tables + row * table_stride
    head_offset = kv_head * HEAD_DIM
    for first in range(begin, stop, TILE):
        positions = first + tl.arange(0, TILE)
        seen = positions < stop
        offsets = token_offsets(positions, seen, table, token_stride, BLOCK_SIZE) + head_offset
        tile_keys = load_tokens(keys, offsets, seen, HEAD_DIM, HEAD_COLUMNS)
        tile_values = load_tokens(values, offsets, seen, HEAD_DIM, HEAD_COLUMNS)
        best, total, output = fold(group, tile_keys, tile_values, seen[None, :], scale, best, total, output)
    results = (row * tl.num_programs(1) * GROUP + heads) * num_parts + part
    tl.store(bests + results, best, mask=members < GROUP)
    tl.store(totals + results, total, mask=members < GROUP)
    tl.store(unfinished + results[:, None] * HEAD_DIM + columns[None, :], output, mask=inside)


@triton.jit(do_not_specialize=["num_parts"])
def _join_parts(
    unfinished: tl.tensor, bests: tl.tensor, totals: tl.tensor, ends: tl.tensor,
    output: tl.tensor, num_parts: tl.tensor,
    WINDOW: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    TILE: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = row * tl.num_programs(1) + tl.program_id(1)
    end = tl.load(ends + row)
    oldest, size = _visible_part(end, WINDOW, TILE, LEAST, MOST)
    parts = tl.arange(0, PARTS)
    columns = tl.arange(0, HEAD_COLUMNS)
    written = parts < tl.cdiv(end - oldest, size)
    results = place * num_parts + parts
    best = tl.load(bests + results, mask=written, other=float("-inf"))
    highest = tl.max(best, 0)
    weights = tl.where(written, tl.exp2(best - tl.where(written, highest, 0.0)), 0.0)
    total = tl.sum(weights * tl.load(totals + results, mask=written, other=0.0), 0)
    inside = written[:, None] & (columns < HEAD_DIM)[None, :]
    sums = tl.load(unfinished + results[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
    joined = tl.sum(sums * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(
        output + place * HEAD_DIM + columns,
        joined.to(output.dtype.element_ty),
        mask=columns < HEAD_DIM,
    )
