"""Attention in plain torch operations, for any machine: the reference for all other backends.

Single tokens (decode) are batched in groups of similar length. The query heads that share a KV head form one small
query matrix, so K and V are read once and never repeated. A group is small enough that gathered K and V are still in
the cache when they are used. Prompt chunks are computed one by one from gathered K and V; with many queries per
sequence, the time is spent in matrix products, which torch does well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from moonserve.engine.kernels import Geometry, Span, singles_first
from moonserve.engine.kv_cache.tensors import TORCH_DTYPES, KvTensors


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Plan for several tokens of one sequence, rows [first, end) of the step."""

    first: int
    end: int
    blocks: torch.Tensor | None  # None = the chunk attends only to itself
    num_tokens: int  # of K and V after gathering
    mask: torch.Tensor | None  # [queries, num_tokens], added to scores; None = plain causal


def _with_sinks(
    keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Appends a token whose key and value are 0 and whose score is the sink of its head. `mask` and `sinks` have any
    shapes that broadcast to [sequences, heads, queries, tokens], the latter with 1 token."""
    scores = sinks.to(mask.device, mask.dtype)
    shape = (mask[..., :1] + scores).shape[:-1]
    with_score = torch.cat((mask.expand(*shape, -1), scores.expand(*shape, 1)), -1)
    return F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1)), with_score


def first_block(span: Span, window: int | None, block_size: int) -> int:
    """Returns the index of the block with the oldest token that the span's first token attends to."""
    return 0 if window is None else max(0, span.start - window + 1) // block_size


# Measured on one core with 1 MiB of L2 cache: larger gathers are evicted before they are read.
_GROUP_BYTES = 1 << 20
_MAX_PADDING = 1.25  # most gathered blocks per needed block within a group


@dataclass(frozen=True, slots=True)
class _Group:
    """Plan for single-token rows [first, end) of the step, padded to `num_blocks` blocks each."""

    first: int
    end: int
    num_blocks: int
    blocks: torch.Tensor  # [rows · num_blocks]
    mask: torch.Tensor  # [rows, 1, 1, num_blocks · block_size], added to scores


@dataclass(frozen=True, slots=True)
class _Plan:
    groups: list[_Group]
    chunks: list[_Chunk]


class TorchPagedAttention:
    """Reference implementation of `Attention`, for any device of torch."""

    name = "torch"
    reads_whole_blocks = True

    def __init__(self, geometry: Geometry, pool: KvTensors) -> None:
        self._heads = geometry.num_heads
        self._kv_heads = geometry.num_kv_heads
        self._queries_per_kv = geometry.num_heads // geometry.num_kv_heads
        self._head_dim = geometry.head_dim
        self._pool = pool
        self._block_size = pool.layout.block_size
        self._dtype = TORCH_DTYPES[pool.dtype]
        self._sinks = geometry.sinks
        self._group_blocks = max(1, _GROUP_BYTES // (2 * pool.layout.piece_bytes))

    def order(self, lengths: Sequence[tuple[int, int]]) -> list[int]:
        return singles_first(lengths)

    # -- planning

    def plan(self, spans: Sequence[Span], window: int | None) -> _Plan:
        singles = [span for span in spans if span.end - span.start == 1]
        rows = accumulate((span.end - span.start for span in spans), initial=0)
        chunks = [
            self._make_chunk(span, row, window)
            for span, row in zip(spans, rows, strict=False)
            if span.end - span.start > 1
        ]
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

    def _make_group(self, singles: Sequence[Span], first: int, end: int, num_blocks: int, window: int | None) -> _Group:
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
        return _Group(first, end, num_blocks, torch.from_numpy(blocks.reshape(-1)), mask[:, None, None, :])

    def _make_chunk(self, span: Span, row: int, window: int | None) -> _Chunk:
        """Plans a span of several tokens. `row`: its first row in the step."""
        end_row = row + span.end - span.start
        sees_all = window is None or span.end <= window
        # With quantised KV, a chunk reads its own K and V from the pool like later chunks do, so that results do not
        # depend on where a prompt is cut.
        if span.start == 0 and sees_all and not self._pool.layout.is_quantised and not self._sinks:
            return _Chunk(row, end_row, None, span.end, None)
        begin = first_block(span, window, self._block_size)
        offset = begin * self._block_size
        queries = torch.arange(span.start, span.end)[:, None]
        keys = torch.arange(offset, span.end)[None, :]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        blocks = torch.from_numpy(span.blocks[begin : -(-span.end // self._block_size)].copy())
        return _Chunk(row, end_row, blocks, span.end - offset, mask)

    def _num_blocks(self, span: Span, window: int | None) -> int:
        """Returns the number of blocks in a single token's context."""
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
        parts += [self._attend_chunk(layer, chunk, queries, keys, values) for chunk in plan.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_group(self, layer: int, group: _Group, queries: torch.Tensor) -> torch.Tensor:
        rows = group.end - group.first
        shape = (rows, group.num_blocks * self._block_size, self._kv_heads, self._head_dim)
        keys, values = self._pool.gather(layer, group.blocks)
        folded = (rows, self._kv_heads, self._queries_per_kv, self._head_dim)
        keys, values, mask = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2), group.mask
        if self._sinks:
            sinks = self._sinks[layer].view(1, self._kv_heads, self._queries_per_kv, 1)
            keys, values, mask = _with_sinks(keys, values, mask, sinks)
        query = queries[group.first : group.end].reshape(folded)
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return output.reshape(rows, self._heads * self._head_dim)

    def _attend_chunk(
        self, layer: int, chunk: _Chunk, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Computes attention of one chunk; gathers its sequence's K and V."""
        own = slice(chunk.first, chunk.end)
        if chunk.blocks is None:
            seen_keys, seen_values = keys[own], values[own]
        else:
            seen_keys, seen_values = (
                piece.flatten(0, 1)[: chunk.num_tokens] for piece in self._pool.gather(layer, chunk.blocks)
            )
        seen_keys, seen_values, mask = seen_keys.transpose(0, 1)[None], seen_values.transpose(0, 1)[None], chunk.mask
        if self._sinks:
            assert mask is not None
            seen_keys, seen_values, mask = _with_sinks(
                seen_keys, seen_values, mask, self._sinks[layer][None, :, None, None]
            )
        output = F.scaled_dot_product_attention(
            queries[own].transpose(0, 1)[None],
            seen_keys,
            seen_values,
            attn_mask=mask,
            is_causal=chunk.mask is None,
            enable_gqa=self._heads != self._kv_heads,
        )
        return output[0].transpose(0, 1).reshape(own.stop - own.start, -1)
