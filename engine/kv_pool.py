"""The bytes of the KV pool as tensors: per layer a K and a V `[num_blocks, block_size, kv_heads, head_dim]`, or a range
of these heads. Where K and V are quantised, heads are rows of bytes, `head_bytes` long.

The memory belongs to whoever registered it with the transfer engine; here are only views, at exactly the offsets that
`protocol.layout` gives to everyone else. A pool on a GPU has the same layout there; `engine.staging` is the way between
the two. Does not know which blocks are in use.

Quantised K and V have a byte per element, and a scale per token and head: int8, or fp8 in E4M3. A head's row is its
codes and behind them the scale (`protocol.layout`). Its rule: a row depends on that head of that token alone, so that
a block's bytes are the same whoever wrote its tokens, in whatever order. The native kernels
(`engine/native/quantise.h`) give the same bits: the scale is the highest magnitude over the highest code, codes are
rounded to nearest, ties to even. Why so and not a scale per block: docs/kv-dtypes.md.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch

from protocol.errors import ConfigError
from protocol.layout import SCALE_BYTES, KvLayout

# Below, a head is as good as zero, and its scale must be no denormal.
_LEAST = 1e-30


@dataclass(frozen=True, slots=True)
class Code:
    """How a byte stands for a number between -`highest` and `highest`."""

    highest: float
    dtype: torch.dtype
    round: Callable[[torch.Tensor], torch.Tensor]


CODES = {
    "int8": Code(127.0, torch.int8, torch.round),
    "fp8": Code(448.0, torch.float8_e4m3fn, torch.positive),  # the conversion rounds
}


def quantise(heads: torch.Tensor, code: Code) -> torch.Tensor:
    """[..., head_dim] of any float dtype → rows [..., head_dim + 4] uint8."""
    wide = heads.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_min(_LEAST) / code.highest
    codes = code.round(wide / scales).to(code.dtype)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], -1)


def dequantise(rows: torch.Tensor, code: Code, dtype: torch.dtype) -> torch.Tensor:
    """rows [..., head_dim + 4] uint8, contiguous → [..., head_dim] in `dtype`."""
    codes = rows[..., :-SCALE_BYTES].view(code.dtype).float()
    return codes.mul_(rows[..., -SCALE_BYTES:].view(torch.float32)).to(dtype)


TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvPool:
    """Views of one pool, or of the KV heads in it that a rank has. `slot` = block · block_size + place in the block.
    `memory` is the host's; that of a pool on a GPU is empty."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        memory: memoryview | None = None,
        device: torch.device | None = None,
        heads: range | None = None,
        dtype: str | None = None,
    ) -> None:
        """`heads`: contiguous; all when None. `dtype`: what K and V are computed in; None = the layout's own, which is
        then not quantised."""
        needed = layout.pool_bytes(num_blocks)
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device or torch.device("cpu")
        is_here = self.device.type == "cpu"
        if memory is None:
            memory = allocate(needed) if is_here else memoryview(b"")
        self.memory = memory
        if is_here and (memory.nbytes < needed or memory.readonly):
            raise ConfigError(
                f"the KV pool needs {needed} writable bytes, not {memory.nbytes}"
                f"{' read-only ones' if memory.readonly else ''}"
            )
        self._heads = heads or range(layout.num_kv_heads)
        self.dtype = dtype or layout.dtype
        self._code = CODES.get(layout.dtype)
        self._bytes = self._allocate(needed)
        pieces = [self._piece(piece) for piece in range(layout.pieces_per_block)]
        self.keys = pieces[0::2]
        self.values = pieces[1::2]
        self._key_slots = [piece.flatten(0, 1) for piece in self.keys]
        self._value_slots = [piece.flatten(0, 1) for piece in self.values]

    def _allocate(self, needed: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.frombuffer(self.memory, dtype=torch.uint8, count=needed)
        return torch.zeros(needed, dtype=torch.uint8, device=self.device)

    def _piece(self, piece: int) -> torch.Tensor:
        layout = self.layout
        shape = (self.num_blocks, layout.block_size, layout.num_kv_heads, -1)
        offset = layout.pool_offset(self.num_blocks, piece, 0)
        own = self._bytes[offset : offset + self.num_blocks * layout.piece_bytes]
        heads = own.view(TORCH_DTYPES.get(layout.dtype, torch.uint8)).view(shape)
        return heads[:, :, self._heads.start : self._heads.stop]

    @property
    def slot_stride(self) -> int:
        """Elements of a piece from a slot to the next one; where it is quantised, bytes."""
        return self.layout.token_bytes // self.keys[0].element_size()

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores K and V `[tokens, kv_heads, head_dim]` at `slots` [tokens]."""
        if self._code is not None:
            keys, values = quantise(keys, self._code), quantise(values, self._code)
        self._key_slots[layer].index_copy_(0, slots, keys)
        self._value_slots[layer].index_copy_(0, slots, values)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these blocks as attention computes with them: `[blocks, block_size, kv_heads, head_dim]` each."""
        keys = self.keys[layer].index_select(0, blocks)
        values = self.values[layer].index_select(0, blocks)
        if self._code is None:
            return keys, values
        dtype = TORCH_DTYPES[self.dtype]
        return dequantise(keys, self._code, dtype), dequantise(values, self._code, dtype)

    def clear(self, slots: torch.Tensor) -> None:
        """Zeroes slots in all layers."""
        own = slots.to(self.device)
        for piece in (*self._key_slots, *self._value_slots):
            piece.index_fill_(0, own, 0)


def allocate(nbytes: int) -> memoryview:
    """Page-aligned zeroed memory of this process."""
    return memoryview(mmap.mmap(-1, nbytes))
