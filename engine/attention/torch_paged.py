"""Attention in plain torch operations, on any machine: the reference for every other backend.

Single tokens (decode) are batched in groups of similar length. The query heads that share a KV head become the rows
of one small query matrix, so that K and V are read once and never repeated; a group is kept small enough that what
was gathered is still in cache when it is used. Prompt chunks go one by one (`engine.attention.chunks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import Geometry, Span, singles_first
from engine.attention.chunks import Chunk, ChunkAttention, first_block, plan_chunks
from engine.kv_pool import TORCH_DTYPES, KvPool

# Measured on one core with 1 MiB of L2: larger gathers are evicted before they are read.
_GROUP_BYTES = 1 << 20
_MAX_PADDING = 1.25  # gathered blocks per needed block within one group


@dataclass(frozen=True, slots=True)
class _Group:
    """Single-token rows [first, end) of the step, padded to `num_blocks` blocks each."""

    first: int
    end: int
    num_blocks: int
    blocks: torch.Tensor  # [rows · num_blocks]
    mask: torch.Tensor  # [rows, 1, 1, num_blocks · block_size], added to scores


@dataclass(frozen=True, slots=True)
class _Plan:
    groups: list[_Group]
    chunks: list[Chunk]


class TorchPagedAttention:
    """Reference implementation of `Attention`, on any device that torch knows."""

    name = "torch"
    reads_whole_blocks = True

    def __init__(self, geometry: Geometry, pool: KvPool) -> None:
        self._heads = geometry.num_heads
        self._kv_heads = geometry.num_kv_heads
        self._queries_per_kv = geometry.num_heads // geometry.num_kv_heads
        self._head_dim = geometry.head_dim
        self._pool = pool
        self._chunks = ChunkAttention(geometry, pool)
        self._block_size = pool.layout.block_size
        self._dtype = TORCH_DTYPES[pool.dtype]
        self._group_blocks = max(1, _GROUP_BYTES // (2 * pool.layout.piece_bytes))

    def order(self, lengths: Sequence[tuple[int, int]]) -> list[int]:
        return singles_first(lengths)

    # -- planning

    def plan(self, spans: Sequence[Span], window: int | None) -> _Plan:
        singles = [span for span in spans if span.end - span.start == 1]
        chunks = plan_chunks(self._chunks, spans, window)
        return _Plan(self._plan_groups(singles, window), chunks)

    def _plan_groups(self, singles: Sequence[Span], window: int | None) -> list[_Group]:
        counts = [self._num_blocks(span, window) for span in singles]
        groups: list[_Group] = []
        first = 0
        while first < len(singles):
            end = self._group_end(counts, first)
            groups.append(self._make_group(singles, first, end, max(counts[first:end]), window))
            first = end
        return groups

    def _group_end(self, counts: Sequence[int], first: int) -> int:
        needed = longest = 0
        for row in range(first, len(counts)):
            needed += counts[row]
            longest = max(longest, counts[row])
            padded = longest * (row + 1 - first)
            if row > first and (padded > self._group_blocks or padded > _MAX_PADDING * needed):
                return row
        return len(counts)

    def _make_group(
        self, singles: Sequence[Span], first: int, end: int, num_blocks: int, window: int | None
    ) -> _Group:
        rows = end - first
        blocks = np.empty((rows, num_blocks), dtype=np.int64)
        visible = np.empty((rows, 2), dtype=np.int64)  # [from, to) in gathered tokens
        for row, span in enumerate(singles[first:end]):
            begin = first_block(span, window, self._block_size)
            table = span.blocks[begin : begin + self._num_blocks(span, window)]
            blocks[row, : len(table)] = table
            blocks[row, len(table) :] = table[0]  # padding must be finite: 0 · NaN is NaN
            offset = begin * self._block_size
            oldest = 0 if window is None else max(0, span.end - window)
            visible[row] = (oldest - offset, span.end - offset)
        tokens = np.arange(num_blocks * self._block_size)
        hidden = (tokens < visible[:, :1]) | (tokens >= visible[:, 1:])
        mask = torch.zeros(hidden.shape, dtype=self._dtype)
        mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))
        return _Group(
            first, end, num_blocks, torch.from_numpy(blocks.reshape(-1)), mask[:, None, None, :]
        )

    def _num_blocks(self, span: Span, window: int | None) -> int:
        """Blocks that hold what a single token sees."""
        return -(-span.end // self._block_size) - first_block(span, window, self._block_size)

    # -- computing

    def attend(
        self,
        layer: int,
        plan: _Plan,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        parts = [self._attend_group(layer, group, queries) for group in plan.groups]
        parts += [self._chunks.attend(layer, chunk, queries, keys, values) for chunk in plan.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_group(self, layer: int, group: _Group, queries: torch.Tensor) -> torch.Tensor:
        rows = group.end - group.first
        shape = (rows, group.num_blocks * self._block_size, self._kv_heads, self._head_dim)
        keys, values = self._pool.gather(layer, group.blocks)
        folded = (rows, self._kv_heads, self._queries_per_kv, self._head_dim)
        output = F.scaled_dot_product_attention(
            queries[group.first : group.end].reshape(folded),
            keys.view(shape).transpose(1, 2),
            values.view(shape).transpose(1, 2),
            attn_mask=group.mask,
        )
        return output.reshape(rows, self._heads * self._head_dim)
