"""The bytes of the KV pool as tensors: per layer a K and a V `[num_blocks, block_size, kv_heads, head_dim]`, or a range
of these heads. Where K and V are quantised, heads are rows of bytes (`engine.quantised`), `head_bytes` long.

The memory belongs to whoever registered it with the transfer engine; here are only views, at exactly the offsets that
`protocol.layout` gives to everyone else. A pool on a GPU has the same layout there; `engine.staging` is the way between
the two. Does not know which blocks are in use.
"""

from __future__ import annotations

import mmap

import torch

from engine.quantised import CODES, dequantise, quantise
from protocol.errors import ConfigError
from protocol.layout import KvLayout

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

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
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
