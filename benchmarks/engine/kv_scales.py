"""Float32 pools that simulate quantised pools, with one scale per token and head, per token, or per block and head.

`kv_error` compares them; workers have scales per token and head (`engine.kv_pool`). A scale per block grows as tokens
arrive: earlier tokens are then quantised again from their rounded values, as a worker would have to do.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.kv_pool import CODES, Code, KvPool
from protocol.layout import KvLayout

GRANULARITIES = ("token, head", "token", "block, head")
_LEAST = 1e-30


class RememberingPool(KvPool):
    """Pool that rounds values as it stores them. For torch kernels and attention only: its tensors are floats."""

    def __init__(self, layout: KvLayout, num_blocks: int, kept: str, granularity: str) -> None:
        super().__init__(layout, num_blocks)
        self.layout = replace(layout, dtype=kept)  # so attention also reads a chunk's own K and V from the pool
        self._rounding = CODES[kept]
        self._granularity = granularity
        shape = (num_blocks, layout.num_kv_heads)
        self._highest = [torch.zeros(shape) for _ in range(2 * layout.num_layers)]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        for part, (piece, heads) in enumerate(((self.keys, keys), (self.values, values))):
            if self._granularity == "block, head":
                self._write_blocks(piece[layer], self._highest[2 * layer + part], slots, heads)
                continue
            shared = (-1,) if self._granularity == "token, head" else (-2, -1)
            highest = heads.abs().amax(shared, keepdim=True)
            piece[layer].flatten(0, 1)[slots] = rounded(heads, highest, self._rounding)

    def _write_blocks(
        self, piece: torch.Tensor, highest: torch.Tensor, slots: torch.Tensor, heads: torch.Tensor
    ) -> None:
        """Uses a scale per block and head. `highest` [blocks, kv_heads] grows; a block's first token resets it."""
        size = self.layout.block_size
        blocks = slots // size
        begun = blocks[slots % size == 0]
        highest[begun], piece[begun] = 0.0, 0.0
        before = highest.clone()
        magnitudes = heads.abs().amax(-1)
        highest.scatter_reduce_(0, blocks[:, None].expand_as(magnitudes), magnitudes, "amax")
        grown = torch.nonzero((highest > before).any(-1)).flatten()
        piece[grown] = rounded(piece[grown], highest[grown][:, None, :, None], self._rounding)
        piece.flatten(0, 1)[slots] = rounded(heads, highest[blocks][..., None], self._rounding)


def rounded(numbers: torch.Tensor, highest: torch.Tensor, code: Code) -> torch.Tensor:
    """Quantises `numbers`, with `highest` mapped to the highest code, and returns them as floats."""
    scales = highest.clamp_min(_LEAST) / code.highest
    return code.round(numbers / scales).to(code.dtype).float() * scales
