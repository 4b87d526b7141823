"""Random cases of attention over a paged pool, and their expected results in float64.

Slots that no sequence may read hold NaN. The same cases run small in Triton's interpreter (tests/engine/cuda) and large
on a GPU. Does not know the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from moonserve.engine.kernels import Geometry, Span


@dataclass(frozen=True, slots=True)
class Pool:
    """Paged K and V of one layer."""

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """One step: the tokens [start, end) of each sequence; earlier tokens are cached."""

    spans: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float32
    head_dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    block_size: int = 16
    window: int | None = None
    # Number of leading blocks shared by all sequences with enough cached full blocks.
    shared_blocks: int = 0
    seed: int = 0

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.heads, self.kv_heads, self.head_dim)

    def with_dtype(self, dtype: torch.dtype) -> AttentionCase:
        return replace(self, dtype=dtype)

    def build(self, device: torch.device) -> AttentionInputs:
        """Creates the tensors of the case on `device`."""
        generator = torch.Generator().manual_seed(self.seed)
        spans = self.placed()
        num_blocks = 1 + max(int(span.blocks.max()) for span in spans)
        shape = (num_blocks, self.block_size, self.kv_heads, self.head_dim)
        keys, values = (torch.full(shape, float("nan"), dtype=self.dtype) for _ in range(2))
        for piece in (keys, values):
            slots = piece.flatten(0, 1)
            for span in spans:
                own = torch.from_numpy(self.slots(span))
                slots[own] = torch.randn((span.end, *shape[2:]), generator=generator).to(self.dtype)
        num_tokens = sum(end - start for start, end in self.spans)
        # As in the model, queries are part of a wider tensor. Large values keep the softmax far from flat.
        wide = 2 * torch.randn(num_tokens, self.heads + 1, self.head_dim, generator=generator)
        queries = wide.to(self.dtype).to(device)[:, : self.heads]
        return AttentionInputs(self, spans, queries, Pool([keys.to(device)], [values.to(device)]))

    def placed(self) -> list[Span]:
        """Assigns scattered blocks to the sequences; block 0 stays unused."""
        counts = [-(-end // self.block_size) for _, end in self.spans]
        rng = np.random.default_rng(self.seed)
        free = 1 + rng.permutation(self.shared_blocks + sum(counts))
        shared, free = free[: self.shared_blocks], free[self.shared_blocks :]
        spans: list[Span] = []
        for (start, end), count in zip(self.spans, counts, strict=True):
            # Only blocks that are cached and full can be shared.
            num_shared = min(self.shared_blocks, start // self.block_size)
            own, free = free[: count - num_shared], free[count - num_shared :]
            blocks = np.concatenate((shared[:num_shared], own))
            spans.append(Span(start, end, blocks, start if end - start == 1 else end))
        return spans

    def slots(self, span: Span) -> np.ndarray:
        """Returns the pool slots of a sequence's tokens."""
        tokens = np.arange(span.end)
        slots: np.ndarray = span.blocks[tokens // self.block_size] * self.block_size + tokens % self.block_size
        return slots


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The tensors of a case on one device."""

    case: AttentionCase
    spans: Sequence[Span]
    queries: torch.Tensor  # [tokens, heads, head_dim]; the row stride exceeds heads · head_dim
    pool: Pool

    def expected(self) -> torch.Tensor:
        """Computes attention by its definition, in float64 on the CPU: [tokens, heads · head_dim]."""
        case = self.case
        keys, values = (piece[0].cpu().flatten(0, 1) for piece in (self.pool.keys, self.pool.values))
        lengths = [span.end - span.start for span in self.spans]
        rows: list[torch.Tensor] = []
        for span, own in zip(self.spans, torch.split(self.queries.cpu(), lengths), strict=True):
            slots = torch.from_numpy(case.slots(span))
            rows.append(dense_attention(own, keys[slots], values[slots], span.start, case.window))
        return torch.cat(rows)


def dense_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    window: int | None,
    first: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention by its definition in float64. Queries [queries, heads, head_dim] are at positions from `start`
    on, K and V [tokens, kv_heads, head_dim] from `first` on. `sinks`: a score of each head that has no value. Returns
    [queries, heads · head_dim]."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
    positions = torch.arange(start, start + len(queries))[:, None]
    tokens = torch.arange(first, first + len(keys))[None, :]
    hidden = tokens > positions
    if window is not None:
        hidden |= tokens <= positions - window
    scores = torch.einsum("qhd,thd->hqt", queries.double(), keys) * queries.shape[2] ** -0.5
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((sinks.double()[:, None, None].expand(*scores.shape[:2], 1), scores), -1)
    weights = scores.softmax(-1)[..., -len(keys) :]
    return torch.einsum("hqt,thd->qhd", weights, values).flatten(1)


TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest ‖found - expected‖ / ‖expected‖ by dtype, for the rounding of the inputs' products and of the result."""


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns ‖found - expected‖ / ‖expected‖ in float64; NaN if either contains NaN."""
    difference = found.detach().cpu().double() - expected.detach().cpu().double()
    return float(difference.norm() / expected.detach().cpu().double().norm())
