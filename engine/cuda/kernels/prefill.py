"""Paged prefill attention: causal, several sequences per step, over cached and new tokens alike.

There is one program per (tile of query tokens, KV head). Its rows are all query heads of the group for each token, so K
and V are read once for all of them and small chunks still fill a tile. Tokens that every row attends to are folded
without a mask; only the diagonal and windows need one. The host plans the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from engine.cuda.kernels.tiles import LOG2_E, fold, load_tokens, token_offsets


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


def tiling_for(head_dim: int, element_bytes: int, group: int) -> Tiling:
    """Returns tile sizes that fit in 99 KiB of shared memory, the least of current GPUs. float32 uses no tensor cores:
    its products are exact and its tiles small."""
    columns = max(16, triton.next_power_of_2(head_dim))
    least_rows = triton.next_power_of_2(group)
    if element_bytes == 4:
        return Tiling(max(32, least_rows), 32 if columns <= 128 else 16, 4, 1)
    if columns <= 128:
        return Tiling(max(128, least_rows), 64, 8, 2)
    return Tiling(max(64, least_rows), 32, 4, 2)


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
    tiling = tiling_for(head_dim, keys.element_size(), group)
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
            seen = positions < diagonal
            offsets = token_offsets(positions, seen, table, token_stride, BLOCK_SIZE) + head_offset
            tile_keys = load_tokens(keys, offsets, seen, HEAD_DIM, HEAD_COLUMNS)
            tile_values = load_tokens(values, offsets, seen, HEAD_DIM, HEAD_COLUMNS)
            best, total, sums = fold(block, tile_keys, tile_values, None, scale, best, total, sums)
    else:
        diagonal = tl.maximum(start - WINDOW + 1, 0) // TILE * TILE
    own = (start + tokens)[:, None]
    for first in range(diagonal, end, TILE):
        positions = first + tl.arange(0, TILE)
        seen = positions < end
        offsets = token_offsets(positions, seen, table, token_stride, BLOCK_SIZE) + head_offset
        tile_keys = load_tokens(keys, offsets, seen, HEAD_DIM, HEAD_COLUMNS)
        tile_values = load_tokens(values, offsets, seen, HEAD_DIM, HEAD_COLUMNS)
        visible = seen[None, :] & (positions[None, :] <= own)
        if WINDOW is not None:
            visible = visible & (positions[None, :] > own - WINDOW)
        best, total, sums = fold(block, tile_keys, tile_values, visible, scale, best, total, sums)
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(output + rows * output_stride + within, sums.to(output.dtype.element_ty), mask=inside)
