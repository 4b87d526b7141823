"""Triton kernels of paged attention: decode, prefill, and the tile operations that both use.

Decode (one token per sequence) is split over the context and has two kernels. In `_attend_part`, one program per
(sequence, KV head, part of the context) reads its K and V once for the whole group of query heads and writes a partial
softmax. `_join_parts` combines the parts (Flash-Decoding). The size of a part depends on its sequence alone, so a
sequence's result has the same bits in any batch. Lengths are read on the device, so a captured graph stays valid while
sequences grow.

Prefill (causal, several sequences per step, over cached and new tokens alike) has one program per (tile of query
tokens, KV head). Its rows are all query heads of the group for each token, so K and V are read once for all of them and
small chunks still fill a tile. Tokens that every row attends to are folded without a mask; only the diagonal and
windows need one. The host plans the tiles.

Scores are in units of log2, since the hardware computes exp2; sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def token_offsets(
    positions: tl.tensor,
    visible: tl.tensor,
    table: tl.tensor,
    token_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Returns offsets in elements from the beginning of a layer's K (or V) to each token; tokens that are not `visible`
    are looked up in block 0."""
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
    return (blocks * BLOCK_SIZE + positions % BLOCK_SIZE) * token_stride


@triton.jit
def load_tokens(
    pool: tl.tensor,
    offsets: tl.tensor,
    visible: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Loads [tokens, HEAD_COLUMNS] of one head; zeros for tokens that are not `visible` and columns behind HEAD_DIM."""
    columns = tl.arange(0, HEAD_COLUMNS)
    inside = visible[:, None]
    if HEAD_COLUMNS != HEAD_DIM:
        inside = inside & (columns < HEAD_DIM)[None, :]
    return tl.load(pool + offsets[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def product(left: tl.tensor, right: tl.tensor, added: tl.tensor) -> tl.tensor:
    """Returns left · right + added (None = nothing) in float32. float32 factors are not rounded to tf32."""
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as if they were integers
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, acc=added, input_precision="ieee")


@triton.jit
def fold(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    visible: tl.tensor,
    scale: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
) -> tl.tensor:
    """Adds tokens to an online softmax (Milakov & Gimelshein; FlashAttention) and returns the running maximum, sum and
    weighted values of each query row. `visible`: None = every row attends to every token."""
    scores = product(queries, tl.trans(keys), None) * scale
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, 1))
    # A row without any token yet (its window begins later) gets weights of 0 instead of exp2(inf - inf).
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weights, 1)
    output = product(weights.to(values.dtype), values, output * shrink[:, None])
    return highest, total, output


# -- decode

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
    visible = num_tokens if window is None else min(num_tokens, window)
    return min(-(-visible // PART), MAX_PARTS)


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
        visible = positions < stop
        offsets = token_offsets(positions, visible, table, token_stride, BLOCK_SIZE) + head_offset
        tile_keys = load_tokens(keys, offsets, visible, HEAD_DIM, HEAD_COLUMNS)
        tile_values = load_tokens(values, offsets, visible, HEAD_DIM, HEAD_COLUMNS)
        best, total, output = fold(group, tile_keys, tile_values, visible[None, :], scale, best, total, output)
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


# -- prefill


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes of a program; powers of two."""

    rows: int  # (token, head of the group) pairs
    tokens: int  # K and V tokens read at a time
    num_warps: int
    num_stages: int

    def tokens_per_tile(self, group: int) -> int:
        """Returns the number of query tokens of one program; `group` is at most `rows`."""
        return self.rows // group

    def shared_bytes(self, columns: int, element_bytes: int) -> int:
        """Returns the bytes of the queries and of the K and V that are being read."""
        return (self.rows + 2 * self.num_stages * self.tokens) * columns * element_bytes


LEAST_SHARED = 99 * 1024
"""Bytes of shared memory of a program on the GPUs with the least of it (compute capability 8.6 and 8.9)."""


def shared_bytes_of(device: torch.device) -> int:
    """Returns the most bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return LEAST_SHARED
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def tiling_for(head_dim: int, element_bytes: int, group: int, shared_bytes: int = LEAST_SHARED) -> Tiling:
    """Returns tile sizes that fit in shared memory, the fastest first. float32 uses no tensor cores: its products are
    exact and its tiles small."""
    columns = max(16, triton.next_power_of_2(head_dim))
    least_rows = triton.next_power_of_2(group)
    if element_bytes == 4:
        return Tiling(max(32, least_rows), 32 if columns <= 128 else 16, 4, 1)
    tilings = _TILINGS[max(64, columns)]
    sized = (Tiling(max(rows, least_rows), tokens, warps, stages) for rows, tokens, warps, stages in tilings)
    *larger, smallest = sized
    return next((one for one in larger if one.shared_bytes(columns, element_bytes) <= shared_bytes), smallest)


_TILINGS = {
    64: ((128, 64, 8, 2),),
    128: ((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2)),
    256: ((128, 64, 8, 2), (64, 32, 4, 2)),
}
"""Fields of `Tiling` by the columns of a head, the fastest on an H100 first; the last ones fit any GPU."""


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Prompt chunks of a step."""

    tables: torch.Tensor  # [chunks, blocks] int32: block tables from each sequence's beginning
    # [tiles, 4] int32: chunk, first row of the step, its position, number of query tokens.
    tiles: torch.Tensor


def plan_tiles(chunks: Sequence[tuple[int, int, int]], tokens_per_tile: int) -> npt.NDArray[np.int32]:
    """Returns `ChunkBatch.tiles` for chunks (first row, start, end), longest context first, since they take longest."""
    tiles = [
        (index, row + first, start + first, min(tokens_per_tile, end - start - first))
        for index, (row, start, end) in enumerate(chunks)
        for first in range(0, end - start, tokens_per_tile)
    ]
    tiles.sort(key=lambda tile: -tile[2])
    return np.array(tiles, dtype=np.int32).reshape(-1, 4)


def prefill_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ChunkBatch,
    window: int | None,
    output: torch.Tensor,
) -> None:
    """Computes prefill attention into the chunks' rows of output [tokens, heads · head_dim], from queries [tokens,
    heads, head_dim] with adjacent heads and a layer's keys and values [blocks, block_size, kv_heads, head_dim]. Scores
    are scaled by head_dim^-½."""
    heads, head_dim = queries.shape[1:]
    block_size, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    tiling = tiling_for(head_dim, keys.element_size(), group, shared_bytes_of(keys.device))
    _attend_tile[(batch.tiles.shape[0], kv_heads)](
        queries, keys, values, output, batch.tables, batch.tiles,
        queries.stride(0), output.stride(0), batch.tables.stride(0), kv_heads * head_dim,
        head_dim**-0.5 * LOG2_E,
        WINDOW=window, BLOCK_SIZE=block_size, GROUP=group, HEAD_DIM=head_dim,
        HEAD_COLUMNS=max(16, triton.next_power_of_2(head_dim)),
        ROWS=tiling.rows, TILE=tiling.tokens,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


@triton.jit
def _attend_tile(
    queries: tl.tensor, keys: tl.tensor, values: tl.tensor, output: tl.tensor, tables: tl.tensor,
    tiles: tl.tensor, query_stride: tl.tensor, output_stride: tl.tensor, table_stride: tl.tensor,
    token_stride: tl.tensor, scale: tl.tensor,
    WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    tile = tiles + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    table = tables + tl.load(tile).to(tl.int64) * table_stride
    first_row = tl.load(tile + 1).to(tl.int64)
    start = tl.load(tile + 2)
    count = tl.load(tile + 3)
    end = start + count
    members = tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_COLUMNS)
    tokens = members // GROUP
    heads = kv_head * GROUP + members % GROUP
    inside = (tokens < count)[:, None] & (columns < HEAD_DIM)[None, :]
    within = heads[:, None] * HEAD_DIM + columns[None, :]
    rows = (first_row + tokens)[:, None]
    block = tl.load(queries + rows * query_stride + within, mask=inside, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, HEAD_COLUMNS], tl.float32)
    head_offset = kv_head * HEAD_DIM
    if WINDOW is None:
        diagonal = (start + 1) // TILE * TILE  # every row attends to all tokens before
        for first in range(0, diagonal, TILE):
            positions = first + tl.arange(0, TILE)
            visible = positions < diagonal
            offsets = token_offsets(positions, visible, table, token_stride, BLOCK_SIZE) + head_offset
            tile_keys = load_tokens(keys, offsets, visible, HEAD_DIM, HEAD_COLUMNS)
            tile_values = load_tokens(values, offsets, visible, HEAD_DIM, HEAD_COLUMNS)
            best, total, sums = fold(block, tile_keys, tile_values, None, scale, best, total, sums)
    else:
        diagonal = tl.maximum(start - WINDOW + 1, 0) // TILE * TILE
    own = (start + tokens)[:, None]
    for first in range(diagonal, end, TILE):
        positions = first + tl.arange(0, TILE)
        visible = positions < end
        offsets = token_offsets(positions, visible, table, token_stride, BLOCK_SIZE) + head_offset
        tile_keys = load_tokens(keys, offsets, visible, HEAD_DIM, HEAD_COLUMNS)
        tile_values = load_tokens(values, offsets, visible, HEAD_DIM, HEAD_COLUMNS)
        visible = visible[None, :] & (positions[None, :] <= own)
        if WINDOW is not None:
            visible = visible & (positions[None, :] > own - WINDOW)
        best, total, sums = fold(block, tile_keys, tile_values, visible, scale, best, total, sums)
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(output + rows * output_stride + within, sums.to(output.dtype.element_ty), mask=inside)
