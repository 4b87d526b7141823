"""The forward pass of the Llama lineage over a flat batch of tokens.

All sequences of a step lie back to back in one tensor; only attention knows where one ends. At the sizes this runs at,
dispatching an operation costs as much as computing it, so projections are fused, tensors are updated in place and
nothing is computed per layer that can be computed per step. Numerics follow transformers, cast for cast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention import Attention, Span
from engine.config import ModelConfig
from engine.kv_pool import KvPool
from engine.rope import RopeTable, apply_rope
from engine.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's tokens as tensors."""

    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    longest: int  # one more than the largest position
    slots: torch.Tensor  # [tokens]: where their KV goes
    spans: Sequence[Span]
    rows: torch.Tensor | None  # tokens whose logits are wanted; None = all of them


class Model:
    """A decoder with its weights, its KV pool and its attention."""

    def __init__(
        self, config: ModelConfig, weights: Weights, pool: KvPool, attention: Attention
    ) -> None:
        self._config = config
        self._weights = weights
        self._pool = pool
        self._attention = attention
        dtype = weights.embedding.dtype
        self._rope = RopeTable(config.rope, config.head_dim, dtype)
        self._q_heads = config.num_heads
        self._rotated_heads = config.num_heads + config.num_kv_heads
        self._all_heads = config.num_heads + 2 * config.num_kv_heads

    def forward(self, step: Step, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Logits `[rows, vocab]`, float32. `on_layer(l)` runs right after layer l's K and V are in the pool."""
        weights = self._weights
        hidden = F.embedding(step.token_ids, weights.embedding)
        cos, sin = self._rope.rows(step.positions, step.longest)
        plans = {
            window: self._attention.plan(step.spans, window)
            for window in set(self._config.sliding_windows)
        }
        for index, layer in enumerate(weights.layers):
            plan = plans[self._config.sliding_windows[index]]
            normed = self._norm(hidden, layer.input_norm)
            queries, keys, values = self._project(normed, layer, cos, sin)
            self._pool.write(index, step.slots, keys, values)
            if on_layer is not None:
                on_layer(index)
            seen = self._attention.attend(index, plan, queries, keys, values)
            hidden += F.linear(seen, layer.o, layer.o_bias)
            hidden += self._mlp(self._norm(hidden, layer.post_norm), layer)
        if step.rows is not None:
            hidden = hidden.index_select(0, step.rows)
        return F.linear(self._norm(hidden, weights.norm), weights.lm_head).float()

    def _project(
        self, normed: torch.Tensor, layer: LayerWeights, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values: [tokens, heads, head_dim] each."""
        heads = F.linear(normed, layer.qkv, layer.qkv_bias)
        heads = heads.view(-1, self._all_heads, self._config.head_dim)
        rotated = heads[:, : self._rotated_heads]
        if layer.qk_norm is not None:
            rotated = self._norm(rotated, layer.qk_norm)
        rotated = apply_rope(rotated, cos, sin)
        return (
            rotated[:, : self._q_heads],
            rotated[:, self._q_heads :],
            heads[:, self._rotated_heads :],
        )

    def _mlp(self, normed: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm in float32, rounded to the compute dtype before the weight is applied (as transformers does)."""
        shape = (hidden.shape[-1],)
        return F.rms_norm(hidden, shape, None, self._config.rms_norm_eps) * weight
