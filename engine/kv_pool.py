"""The bytes of the KV pool as tensors: per layer a K and a V `[num_blocks, block_size, kv_heads, head_dim]`.

The memory belongs to whoever registered it with the transfer engine; here are only views, at exactly the offsets that
`protocol.layout` gives to everyone else. A pool on a GPU has the same layout there, and the host's memory only holds
what is on its way in or out. Does not know which blocks are in use.
"""

from __future__ import annotations

import mmap

import torch

from protocol.errors import ConfigError
from protocol.layout import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvPool:
    """Views of one pool. `slot` = block · block_size + place in the block."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        memory: memoryview | None = None,
        device: torch.device | None = None,
    ) -> None:
        needed = layout.pool_bytes(num_blocks)
        self.memory = allocate(needed) if memory is None else memory
        self.layout = layout
        self.num_blocks = num_blocks
        if self.memory.nbytes < needed or self.memory.readonly:
            raise ConfigError(
                f"the KV pool needs {needed} writable bytes, not {self.memory.nbytes}"
                f"{' read-only ones' if self.memory.readonly else ''}"
            )
        self.device = device or torch.device("cpu")
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
        shape = (self.num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        offset = layout.pool_offset(self.num_blocks, piece, 0)
        own = self._bytes[offset : offset + self.num_blocks * layout.piece_bytes]
        return own.view(TORCH_DTYPES[layout.dtype]).view(shape)

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Stores K and V `[tokens, kv_heads, head_dim]` at `slots` [tokens]."""
        self._key_slots[layer].index_copy_(0, slots, keys)
        self._value_slots[layer].index_copy_(0, slots, values)

    def clear(self, slots: torch.Tensor) -> None:
        """Zeroes slots in all layers."""
        own = slots.to(self.device)
        for piece in (*self._key_slots, *self._value_slots):
            piece.index_fill_(0, own, 0)


def allocate(nbytes: int) -> memoryview:
    """Page-aligned zeroed memory of this process."""
    return memoryview(mmap.mmap(-1, nbytes))
