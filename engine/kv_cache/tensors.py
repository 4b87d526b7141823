"""The KV pool as tensors: per layer one K and one V `[num_blocks, block_size, kv_heads, head_dim]`, or a range of these
heads. If KV is quantised, a head is a row of `head_bytes` bytes.

The memory belongs to the code that registered it with the transfer engine. This module only has views of it, at the
offsets that `protocol.kv_blocks` defines. A pool on a GPU has the same layout; `engine.cuda.staging` copies between the
two. The pool does not know which blocks are in use.

Quantised K and V have one byte per element, int8 or fp8 (E4M3), and one scale per token and head. A row holds the codes
of a head, followed by the scale (`protocol.kv_blocks`). Rule: a row depends only on that head of that token, so a
block's bytes do not depend on which process wrote its tokens or in which order. The native kernels
(`engine/kernels/native/quantise.h`) produce the same bits: the scale is the highest magnitude divided by the highest
code, and codes are rounded to nearest, ties to even. docs/kv-dtypes.md says why the scale is not per block.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moonserve.engine.cuda.streams import map_host_memory
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import SCALE_BYTES, KvLayout
from moonserve.protocol.request import BlockId

# Lower bound of a head's magnitude: smaller heads count as zero, and the scale must not be denormal.
_LEAST = 1e-30


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Encoding of numbers from -`highest` to `highest` in one byte."""

    highest: float
    dtype: torch.dtype
    round: Callable[[torch.Tensor], torch.Tensor]


QUANTISATIONS = {
    "int8": Quantisation(127.0, torch.int8, torch.round),
    "fp8": Quantisation(448.0, torch.float8_e4m3fn, torch.positive),  # the conversion rounds
}


def quantise(heads: torch.Tensor, code: Quantisation) -> torch.Tensor:
    """Quantises [..., head_dim] of any float dtype to rows [..., head_dim + 4] uint8."""
    wide = heads.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_min(_LEAST) / code.highest
    codes = code.round(wide / scales).to(code.dtype)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], -1)


def dequantise(rows: torch.Tensor, code: Quantisation, dtype: torch.dtype) -> torch.Tensor:
    """Dequantises contiguous rows [..., head_dim + 4] uint8 to [..., head_dim] in `dtype`."""
    codes = rows[..., :-SCALE_BYTES].view(code.dtype).float()
    return codes.mul_(rows[..., -SCALE_BYTES:].view(torch.float32)).to(dtype)


TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvTensors:
    """Tensor views of one pool, or of a rank's KV heads in it. A slot is block · block_size + position in the block.
    `memory` is host memory; it is empty for a pool in a GPU's memory."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        memory: memoryview | None = None,
        device: torch.device | None = None,
        heads: range | None = None,
        dtype: str | None = None,
    ) -> None:
        """`memory`: host memory, which a GPU reaches over the bus; None = newly allocated memory of `device`. `heads`:
        range of KV heads; all if None. `dtype`: compute dtype of K and V; None means the layout's, which must not be
        quantised then. Raises ConfigError if `memory` is too small or read-only."""
        needed = layout.pool_bytes(num_blocks)
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device or torch.device("cpu")
        if memory is None and self.device.type == "cpu":
            memory = allocate_memory(needed)
        self.memory = memory or memoryview(b"")
        if memory is not None and (memory.nbytes < needed or memory.readonly):
            raise ConfigError(
                f"the KV pool needs {needed} writable bytes, not {memory.nbytes}"
                f"{' read-only ones' if memory.readonly else ''}"
            )
        self._heads = heads or range(layout.num_kv_heads)
        self.dtype = dtype or layout.dtype
        self._code = QUANTISATIONS.get(layout.dtype)
        self._bytes = self._allocate(needed)
        pieces = [self._piece(piece) for piece in range(layout.pieces_per_block)]
        self.keys = pieces[0::2]
        self.values = pieces[1::2]
        self._key_slots = [piece.flatten(0, 1) for piece in self.keys]
        self._value_slots = [piece.flatten(0, 1) for piece in self.values]

    def _allocate(self, needed: int) -> torch.Tensor:
        if self.memory:
            return map_host_memory(self.memory[:needed], self.device)
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
        """Distance between slots of a piece, in elements, or in bytes if KV is quantised."""
        return self.layout.token_bytes // self.keys[0].element_size()

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores K and V `[tokens, kv_heads, head_dim]` at `slots` [tokens]."""
        if self._code is not None:
            keys, values = quantise(keys, self._code), quantise(values, self._code)
        self._key_slots[layer].index_copy_(0, slots, keys)
        self._value_slots[layer].index_copy_(0, slots, values)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of K and V of these blocks in the compute dtype, `[blocks, block_size, kv_heads, head_dim]`
        each."""
        keys = self.keys[layer].index_select(0, blocks)
        values = self.values[layer].index_select(0, blocks)
        if self._code is None:
            return keys, values
        dtype = TORCH_DTYPES[self.dtype]
        return dequantise(keys, self._code, dtype), dequantise(values, self._code, dtype)

    def clear(self, slots: torch.Tensor) -> None:
        """Zeroes `slots` in all layers."""
        own = slots.to(self.device)
        for piece in (*self._key_slots, *self._value_slots):
            piece.index_fill_(0, own, 0)


def allocate_memory(nbytes: int) -> memoryview:
    """Allocates page-aligned, zeroed, private memory."""
    return memoryview(mmap.mmap(-1, nbytes))


class BlockZeroer:
    """Zeroes blocks of a pool in host memory when it is called, before another request gets them
    (`--zero-kv-blocks`)."""

    def __init__(self, memory: memoryview, layout: KvLayout, num_blocks: int) -> None:
        """Raises ValueError if `memory` is too small or read-only."""
        needed = layout.pool_bytes(num_blocks)
        if memory.nbytes < needed or memory.readonly:
            raise ValueError(f"{num_blocks} blocks to be zeroed need {needed} writable bytes")
        flat = np.frombuffer(memory, np.uint8, needed)
        self._bytes = flat.reshape(layout.pieces_per_block, num_blocks, layout.piece_bytes)

    def __call__(self, blocks: Sequence[BlockId]) -> None:
        for first, end in consecutive_runs(blocks):
            self._bytes[:, first:end] = 0


def consecutive_runs(blocks: Sequence[BlockId]) -> Iterator[tuple[BlockId, BlockId]]:
    """Yields (first, last + 1) of each run of consecutive blocks, in the order of `blocks`."""
    begin = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield blocks[begin], blocks[index - 1] + 1
            begin = index
