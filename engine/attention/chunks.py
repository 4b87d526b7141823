"""Attention of prompt chunks, one sequence at a time, in plain torch operations.

The torch backend's alone: native and Triton kernels read a chunk's K and V where they lie. With many queries per
sequence the time is in matrix products, which torch does well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention.base import Geometry, Span
from engine.kv_pool import TORCH_DTYPES, KvPool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several tokens of one sequence, rows [first, end) of the step."""

    first: int
    end: int
    blocks: torch.Tensor | None  # None = the chunk sees nothing but itself
    num_tokens: int  # of K and V after gathering
    mask: torch.Tensor | None  # [queries, num_tokens], added to scores; None = plain causal


class ChunkAttention:
    """Gathers a sequence's K and V once per layer, then scaled_dot_product_attention."""

    def __init__(self, geometry: Geometry, pool: KvPool) -> None:
        self._grouped = geometry.num_heads != geometry.num_kv_heads
        self._pool = pool
        self._block_size = pool.layout.block_size
        self._dtype = TORCH_DTYPES[pool.dtype]

    def plan(self, span: Span, row: int, window: int | None) -> Chunk:
        """`row`: the span's first row in the step."""
        end_row = row + span.end - span.start
        sees_all = window is None or span.end <= window
        # Where KV is quantised a chunk sees its own K and V as later ones will: cut elsewhere, it gives the same.
        if span.start == 0 and sees_all and not self._pool.layout.is_quantised:
            return Chunk(row, end_row, None, span.end, None)
        begin = first_block(span, window, self._block_size)
        offset = begin * self._block_size
        queries = torch.arange(span.start, span.end)[:, None]
        keys = torch.arange(offset, span.end)[None, :]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        blocks = torch.from_numpy(span.blocks[begin : -(-span.end // self._block_size)].copy())
        return Chunk(row, end_row, blocks, span.end - offset, mask)

    def attend(
        self,
        layer: int,
        chunk: Chunk,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """As `Attention.attend`, for the chunk's own rows: [queries, heads · head_dim]."""
        own = slice(chunk.first, chunk.end)
        if chunk.blocks is None:
            seen_keys, seen_values = keys[own], values[own]
        else:
            seen_keys, seen_values = (
                piece.flatten(0, 1)[: chunk.num_tokens]
                for piece in self._pool.gather(layer, chunk.blocks)
            )
        output = F.scaled_dot_product_attention(
            queries[own].transpose(0, 1)[None],
            seen_keys.transpose(0, 1)[None],
            seen_values.transpose(0, 1)[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            enable_gqa=self._grouped,
        )
        return output[0].transpose(0, 1).reshape(own.stop - own.start, -1)


def plan_chunks(
    attention: ChunkAttention, spans: Sequence[Span], window: int | None
) -> list[Chunk]:
    """Plans all spans of more than one token; each span lies behind those before it."""
    chunks: list[Chunk] = []
    row = 0
    for span in spans:
        if span.end - span.start > 1:
            chunks.append(attention.plan(span, row, window))
        row += span.end - span.start
    return chunks


def first_block(span: Span, window: int | None, block_size: int) -> int:
    """The block of the oldest token that the span's first token sees."""
    return 0 if window is None else max(0, span.start - window + 1) // block_size
