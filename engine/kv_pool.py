"""The bytes of the KV pool as tensors: per layer a K and a V `[num_blocks, block_size, kv_heads, head_dim]`.

The memory belongs to whoever registered it with the transfer engine; here are only views, at exactly the offsets that
`protocol.layout` gives to everyone else. Does not know which blocks are in use.
"""

from __future__ import annotations

import mmap

import torch

from protocol.errors import ConfigError
from protocol.layout import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvPool:
    """Views of one pool. `slot` = block · block_size + place in the block."""

    def __init__(self, layout: KvLayout, num_blocks: int, memory: memoryview | None = None) -> None:
        needed = layout.pool_bytes(num_blocks)
        self.memory = allocate(needed) if memory is None else memory
        self.layout = layout
        self.num_blocks = num_blocks
        if self.memory.nbytes < needed or self.memory.readonly:
            raise ConfigError(
                f"the KV pool needs {needed} writable bytes, not {self.memory.nbytes}"
                f"{' read-only ones' if self.memory.readonly else ''}"
            )
        pieces = [self._piece(piece) for piece in range(layout.pieces_per_block)]
        self.keys = pieces[0::2]
        self.values = pieces[1::2]
        self._key_slots = [piece.flatten(0, 1) for piece in self.keys]
        self._value_slots = [piece.flatten(0, 1) for piece in self.values]

    def _piece(self, piece: int) -> torch.Tensor:
        layout = self.layout
        shape = (self.num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        flat = torch.frombuffer(
            self.memory,
            dtype=TORCH_DTYPES[layout.dtype],
            offset=layout.pool_offset(self.num_blocks, piece, 0),
            count=shape[0] * shape[1] * shape[2] * shape[3],
        )
        return flat.view(shape)

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Stores K and V `[tokens, kv_heads, head_dim]` at `slots` [tokens]."""
        self._key_slots[layer].index_copy_(0, slots, keys)
        self._value_slots[layer].index_copy_(0, slots, values)

    def clear(self, slots: torch.Tensor) -> None:
        """Zeroes slots in all layers."""
        for piece in (*self._key_slots, *self._value_slots):
            piece.index_fill_(0, slots, 0)


def allocate(nbytes: int) -> memoryview:
    """Page-aligned zeroed memory of this process."""
    return memoryview(mmap.mmap(-1, nbytes))
