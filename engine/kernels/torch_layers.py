"""Kernels in plain torch operations, for any device: the reference for all other implementations.

Projections are fused, tensors are updated in place, and nothing is computed per layer that can be computed per step.

A `Linear` is a product with constant weights in the layout that is fastest for the CPU's library. With a few rows, a
product is bound by reading its weights; oneDNN reads weights that were reordered once two to three times as fast as
row-major ones. Without oneDNN the plain operation is used.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moonserve.engine.kernels import AllReduce, Heads, Step
from moonserve.engine.kernels.rope import RopeTable, apply_rope
from moonserve.engine.kv_cache.tensors import KvTensors
from moonserve.engine.model.config import ModelConfig
from moonserve.engine.model.config.experts import ClampedGate
from moonserve.engine.model.weights import Weights
from moonserve.engine.model.weights.layer_weights import LayerWeights, plain

Linear = Callable[[torch.Tensor], torch.Tensor]
"""Computes x [rows, in] → x · weightᵀ + bias [rows, out]."""

# Number of rows for which weights are reordered. Measured: in bfloat16, 8 is as good as any number from 1 to 512; in
# float32, it is twice as good as 1.
_TYPICAL_ROWS = 8


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Creates the fastest `Linear` for a weight [out, in], which may keep a reordered copy instead of the weight."""
    if weight.device.type == "cpu" and len(weight) and can_pack(weight.dtype):
        return _packed(weight, bias)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return plain


def can_pack(dtype: torch.dtype) -> bool:
    """True if this build of torch and this CPU have reordered products in `dtype`."""
    operations = torch.ops.mkldnn
    if not torch._C._has_mkldnn or not hasattr(operations, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(operations._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    product = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = product(x, packed, bias, "none", [], "")
        return result

    return linear


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One decoder layer with prepared weights."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    router: Linear | None
    mlps: list[tuple[Linear, Linear]]  # gate_up and down, of each expert

    @classmethod
    def make(cls, weights: LayerWeights) -> "_Layer":
        return cls(
            input_norm=weights.input_norm,
            qkv=make_linear(plain(weights.qkv), weights.qkv_bias),
            qk_norm=weights.qk_norm,
            o=make_linear(plain(weights.o), weights.o_bias),
            post_norm=weights.post_norm,
            router=None if weights.router is None else make_linear(weights.router, weights.router_bias),
            mlps=[
                (make_linear(plain(mlp.gate_up), mlp.gate_up_bias), make_linear(plain(mlp.down), mlp.down_bias))
                for mlp in weights.mlps
            ],
        )


def _mlp(mlp: tuple[Linear, Linear], x: torch.Tensor, clamped: ClampedGate | None = None) -> torch.Tensor:
    gate, up = mlp[0](x).chunk(2, dim=-1)
    if clamped is None:
        return mlp[1](F.silu(gate).mul_(up))
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    return mlp[1]((up + 1) * (gate * torch.sigmoid(gate * clamped.alpha)))


@dataclass(slots=True)
class _Pass:
    hidden: torch.Tensor  # [tokens, hidden_size], updated in place
    cos: torch.Tensor  # [tokens, 1, head_dim], and sin
    sin: torch.Tensor
    slots: torch.Tensor


class TorchKernels:
    """Reference implementation of `Kernels`."""

    name = "torch"

    def __init__(
        self, config: ModelConfig, weights: Weights, pool: KvTensors, collectives: AllReduce | None = None
    ) -> None:
        """`collectives`: sums over the ranks that share the model; None = the model is whole."""
        self._collectives = collectives
        self._embedding = weights.embedding
        self._final_norm = weights.norm
        self._lm_head = make_linear(plain(weights.lm_head), None)
        self._layers = [_Layer.make(layer) for layer in weights.layers]
        self._pool = pool
        self._rope = RopeTable(config.rope, config.head_dim, weights.embedding.dtype)
        self._epsilon = config.rms_norm_eps
        self._experts = config.experts
        self._head_dim = config.head_dim
        self._q_heads = config.num_heads
        self._rotated_heads = config.num_heads + config.num_kv_heads
        self._all_heads = config.num_heads + 2 * config.num_kv_heads

    def begin(self, step: Step) -> _Pass:
        cos, sin = self._rope.rows(step.positions, step.longest)
        hidden = F.embedding(step.token_ids, self._embedding) if step.hidden is None else step.hidden.clone()
        return _Pass(hidden, cos, sin, step.slots)

    def project(self, layer: int, work: _Pass) -> Heads:
        own = self._layers[layer]
        normed = self._norm(work.hidden, own.input_norm)
        heads = own.qkv(normed).view(-1, self._all_heads, self._head_dim)
        rotated = heads[:, : self._rotated_heads]
        if own.qk_norm is not None:
            rotated = self._norm(rotated, own.qk_norm)
        rotated = apply_rope(rotated, work.cos, work.sin)
        keys, values = rotated[:, self._q_heads :], heads[:, self._rotated_heads :]
        self._pool.write(layer, work.slots, keys, values)
        return rotated[:, : self._q_heads], keys, values

    def finish(self, layer: int, work: _Pass, attended: torch.Tensor) -> None:
        own = self._layers[layer]
        self._add(work.hidden, own.o(attended))
        normed = self._norm(work.hidden, own.post_norm)
        part = _mlp(own.mlps[0], normed) if own.router is None else self._mixed(own, own.router(normed), normed)
        self._add(work.hidden, part)

    def _mixed(self, own: _Layer, logits: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Returns what the experts that `logits` [rows, experts] choose make of the rows."""
        assert self._experts is not None
        shares, chosen = logits.float().softmax(-1).topk(self._experts.per_token)
        if self._experts.normalised:
            shares /= shares.sum(-1, keepdim=True)
        mixed = torch.zeros_like(normed)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            part = _mlp(own.mlps[expert], normed[rows], self._experts.clamped) * shares[rows, places, None]
            mixed.index_add_(0, rows, part.to(mixed.dtype))
        return mixed

    def _add(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        if self._collectives is None:
            hidden += part
        else:
            self._collectives.all_reduce(hidden, part)

    def hidden(self, work: _Pass) -> torch.Tensor:
        return work.hidden

    def select_rows(self, work: _Pass, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        work.hidden = work.hidden.index_select(0, rows)
        return attended.index_select(0, rows)

    def logits(self, work: _Pass) -> torch.Tensor:
        return self._lm_head(self._norm(work.hidden, self._final_norm)).float()

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Computes RMSNorm in float32, rounded to the compute dtype before the weight is applied, like transformers."""
        return F.rms_norm(hidden, (hidden.shape[-1],), None, self._epsilon) * weight
