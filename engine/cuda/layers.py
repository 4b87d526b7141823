"""`Kernels` for CUDA devices: vendor matrix products, with the operations between them fused in Triton.

The output of a half layer is added to the residual stream by the next norm, which has to read both anyway.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from moonserve.engine.cuda.device import require_triton
from moonserve.engine.cuda.streams import to_device
from moonserve.engine.kernels import Heads, Step
from moonserve.engine.kernels.rope import RopeTable
from moonserve.engine.kv_cache.tensors import KvTensors
from moonserve.engine.model.config import ModelConfig
from moonserve.engine.model.weights import Weights
from moonserve.engine.model.weights.layer_weights import LayerWeights, plain

if TYPE_CHECKING:
    from moonserve.engine.cuda.layer_kernels import Positions


@dataclass(slots=True)
class _Pass:
    hidden: torch.Tensor  # [tokens, hidden_size], updated in place
    pending: torch.Tensor | None  # not yet added to `hidden`
    rotation: "Positions"


def longest_sequence(config: ModelConfig, pool: KvTensors) -> int:
    """Returns the length of the longest sequence that the model supports and the pool holds."""
    return min(config.max_position_embeddings, pool.num_blocks * pool.layout.block_size)


class TritonKernels:
    """Implementation of `Kernels` for CUDA devices, and for any device in Triton's interpreter. Raises ConfigError if
    it cannot run."""

    name = "triton"

    def __init__(self, config: ModelConfig, weights: Weights, pool: KvTensors) -> None:
        device = weights.embedding.device
        require_triton(device)
        from moonserve.engine.cuda import layer_kernels  # imports triton

        self._fused = layer_kernels
        self._config = config
        self._weights = weights
        self._pool = pool
        self._angles = RopeTable(config.rope, config.head_dim, weights.embedding.dtype, device)
        # Kept alive for captured graphs, which read this table. Growing for longer sequences creates another table.
        self._captured_angles = self._angles.tables(longest_sequence(config, pool))

    def begin(self, step: Step) -> _Pass:
        device = self._weights.embedding.device
        tokens, positions, slots = (to_device(one, device) for one in (step.token_ids, step.positions, step.slots))
        if step.device_tokens is not None:
            tokens = tokens.clone()
            step.device_tokens.put_into(tokens)
        cos, signed_sin = self._angles.rows(positions, step.longest)
        rotation = self._fused.Positions(cos, signed_sin, slots)
        return _Pass(F.embedding(tokens, self._weights.embedding), None, rotation)

    def project(self, layer: int, work: _Pass) -> Heads:
        own = self._weights.layers[layer]
        normed = self._add_norm(work, own.input_norm)
        config = self._config
        heads = F.linear(normed, plain(own.qkv), own.qkv_bias).view(normed.shape[0], -1, config.head_dim)
        self._fused.rotate_and_store(
            heads,
            config.num_heads,
            own.qk_norm,
            config.rms_norm_eps,
            work.rotation,
            self._pool.keys[layer],
            self._pool.values[layer],
        )
        rotated = config.num_heads + config.num_kv_heads
        return (
            heads[:, : config.num_heads],
            heads[:, config.num_heads : rotated],
            heads[:, rotated:],
        )

    def finish(self, layer: int, work: _Pass, attended: torch.Tensor) -> None:
        own = self._weights.layers[layer]
        work.pending = F.linear(attended, plain(own.o), own.o_bias)
        work.pending = self._mlp(self._add_norm(work, own.post_norm), own)

    def _mlp(self, normed: torch.Tensor, own: LayerWeights) -> torch.Tensor:
        [mlp] = own.mlps  # no experts here
        inner = self._fused.swiglu(F.linear(normed, plain(mlp.gate_up), mlp.gate_up_bias))
        return F.linear(inner, plain(mlp.down), mlp.down_bias)

    def hidden(self, work: _Pass) -> torch.Tensor:
        return work.hidden if work.pending is None else work.hidden + work.pending

    def select_rows(self, work: _Pass, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        rows = to_device(rows, work.hidden.device)
        work.hidden = work.hidden.index_select(0, rows)
        return attended.index_select(0, rows)

    def logits(self, work: _Pass) -> torch.Tensor:
        normed = self._add_norm(work, self._weights.norm)
        return F.linear(normed, plain(self._weights.lm_head)).float()

    def _add_norm(self, work: _Pass, weight: torch.Tensor) -> torch.Tensor:
        normed = self._fused.add_norm(work.hidden, work.pending, weight, self._config.rms_norm_eps)
        work.pending = None
        return normed
