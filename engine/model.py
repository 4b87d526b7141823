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
from engine.linear import Linear, make_linear
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One decoder layer, ready to run."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int | None

    @classmethod
    def make(cls, weights: LayerWeights, window: int | None) -> _Layer:
        return cls(
            input_norm=weights.input_norm,
            qkv=make_linear(weights.qkv, weights.qkv_bias),
            qk_norm=weights.qk_norm,
            o=make_linear(weights.o, weights.o_bias),
            post_norm=weights.post_norm,
            gate_up=make_linear(weights.gate_up, weights.gate_up_bias),
            down=make_linear(weights.down, weights.down_bias),
            window=window,
        )


class Model:
    """A decoder with its weights, its KV pool and its attention."""

    def __init__(
        self, config: ModelConfig, weights: Weights, pool: KvPool, attention: Attention
    ) -> None:
        self._config = config
        self._embedding = weights.embedding
        self._final_norm = weights.norm
        self._lm_head = make_linear(weights.lm_head, None)
        self._layers = [
            _Layer.make(layer, window)
            for layer, window in zip(weights.layers, config.sliding_windows, strict=True)
        ]
        self._pool = pool
        self._attention = attention
        dtype = weights.embedding.dtype
        self._rope = RopeTable(config.rope, config.head_dim, dtype)
        self._q_heads = config.num_heads
        self._rotated_heads = config.num_heads + config.num_kv_heads
        self._all_heads = config.num_heads + 2 * config.num_kv_heads

    def forward(self, step: Step, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Logits `[rows, vocab]`, float32. `on_layer(l)` runs right after layer l's K and V are in the pool."""
        hidden = F.embedding(step.token_ids, self._embedding)
        cos, sin = self._rope.rows(step.positions, step.longest)
        plans = {
            window: self._attention.plan(step.spans, window)
            for window in set(self._config.sliding_windows)
        }
        for index, layer in enumerate(self._layers):
            normed = self._norm(hidden, layer.input_norm)
            queries, keys, values = self._project(normed, layer, cos, sin)
            self._pool.write(index, step.slots, keys, values)
            if on_layer is not None:
                on_layer(index)
            seen = self._attention.attend(index, plans[layer.window], queries, keys, values)
            hidden += layer.o(seen)
            hidden += self._mlp(self._norm(hidden, layer.post_norm), layer)
        if step.rows is not None:
            hidden = hidden.index_select(0, step.rows)
        return self._lm_head(self._norm(hidden, self._final_norm)).float()

    def _project(
        self, normed: torch.Tensor, layer: _Layer, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values: [tokens, heads, head_dim] each."""
        heads = layer.qkv(normed).view(-1, self._all_heads, self._config.head_dim)
        rotated = heads[:, : self._rotated_heads]
        if layer.qk_norm is not None:
            rotated = self._norm(rotated, layer.qk_norm)
        rotated = apply_rope(rotated, cos, sin)
        return (
            rotated[:, : self._q_heads],
            rotated[:, self._q_heads :],
            heads[:, self._rotated_heads :],
        )

    def _mlp(self, normed: torch.Tensor, layer: _Layer) -> torch.Tensor:
        gate, up = layer.gate_up(normed).chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm in float32, rounded to the compute dtype before the weight is applied (as transformers does)."""
        shape = (hidden.shape[-1],)
        return F.rms_norm(hidden, shape, None, self._config.rms_norm_eps) * weight
