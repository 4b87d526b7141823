"""Shape of the paged KV cache and the offset of each piece of a block.

A *piece* is one block's K or V in one layer: `[block_size, num_kv_heads, head_dim]`, contiguous, tokens outermost. The
first n tokens of a piece are its first n·token_bytes bytes. In quantised KV, a head of a token consists of its codes,
one byte each, followed by their scale, a float32. A token is quantised once, when it is written; later writes do not
change it.

A worker's pool is layer-major: for each layer all K pieces, then all V pieces, so that a kernel sees one tensor
`[num_blocks, block_size, num_kv_heads, head_dim]`. A stored object is block-major: the block's pieces back to back in
the order K0 V0 K1 V1 …, which is also the order of a block's checksum.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass, replace

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes per element of the dtypes in which models compute and in which unquantised KV is kept."""

QUANTISED_DTYPES = ("fp8", "int8")
"""Dtypes of quantised KV; fp8 is E4M3 (4 bits of exponent, 3 of mantissa, no infinity)."""

SCALE_BYTES = 4
KV_DTYPES = (*DTYPE_BYTES, *QUANTISED_DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """KV geometry of one rank of one model, equal at both ends of every transfer."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"KV dtype {self.dtype!r} is not one of {', '.join(KV_DTYPES)}")
        if min(self.num_layers, self.block_size, self.num_kv_heads, self.head_dim) < 1:
            raise ValueError(f"every dimension of a KV layout is at least 1: {self}")
        if self.is_quantised and self.head_dim % SCALE_BYTES:
            raise ValueError(f"KV in {self.dtype} needs a head_dim that is a multiple of 4: {self}")

    def of_layers(self, num_layers: int) -> KvLayout:
        """Returns the layout of blocks with this many layers, as one stage of a pipeline keeps them."""
        return replace(self, num_layers=num_layers)

    @property
    def is_quantised(self) -> bool:
        return self.dtype in QUANTISED_DTYPES

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of a token's K (or V) in one layer."""
        if self.is_quantised:
            return self.head_dim + SCALE_BYTES
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer."""
        return self.num_kv_heads * self.head_bytes

    @property
    def piece_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @property
    def pieces_per_block(self) -> int:
        return 2 * self.num_layers

    @property
    def block_bytes(self) -> int:
        return self.pieces_per_block * self.piece_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens; the last one may be partial."""
        return -(-num_tokens // self.block_size)

    def pool_bytes(self, num_blocks: int) -> int:
        """Size in bytes of a pool of `num_blocks` blocks."""
        return num_blocks * self.block_bytes

    def pool_offset(self, num_blocks: int, piece: int, block_id: int) -> int:
        """Byte offset of piece `piece` (2·layer for K, 2·layer + 1 for V) of a block in a pool of `num_blocks`."""
        return (piece * num_blocks + block_id) * self.piece_bytes


def fingerprint(weights_digest: str, layout: KvLayout, dtype: str | None = None) -> str:
    """Returns the identity of everything that determines a block's bytes. Workers pair only if theirs are equal.

    `dtype` is the dtype of computation, if it differs from the layout's."""
    parts = ["moonserve-kv-1", weights_digest, *map(str, astuple(layout))]
    if dtype is not None and dtype != layout.dtype:
        parts.append(dtype)
    return hashlib.blake2b("|".join(parts).encode(), digest_size=16).hexdigest()
