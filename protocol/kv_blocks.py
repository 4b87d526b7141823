"""A block of KV: its key (chained hash of its tokens), layout (shape, offset of each piece) and checksum (XXH3-64)."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NewType

import numpy as np
import numpy.typing as npt
import xxhash

# Keys: chained identities of blocks of tokens, valid in the whole cluster. A key commits to the model's fingerprint,
# the tenant's salt and every token up to the end of its block, so equal keys mean equal KV. The hash is BLAKE2b and not
# a faster one, because tenants choose the tokens and a collision would give one tenant the cache of another.

BlockKey = NewType("BlockKey", bytes)

KEY_BYTES = 16
NO_PARENT = BlockKey(bytes(KEY_BYTES))
"""Parent of a chain's first block, on the wire."""

TOKEN_DTYPE = np.dtype("<u4")


def root_key(fingerprint: str, cache_salt: str = "") -> BlockKey:
    """Returns the parent key of every first block. It differs if the model or the salt differs."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"moonserve-root")
    for part in (fingerprint, cache_salt):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return BlockKey(digest.digest())


def block_keys(root: BlockKey, token_ids: Sequence[int] | npt.NDArray[np.uint32], block_size: int) -> list[BlockKey]:
    """Returns the keys of the full blocks of `token_ids`. A trailing partial block has no key."""
    packed = memoryview(pack_tokens(token_ids))
    stride = block_size * TOKEN_DTYPE.itemsize
    keys: list[BlockKey] = []
    parent = root
    for start in range(0, len(packed) - stride + 1, stride):
        parent = child_key(parent, packed[start : start + stride])
        keys.append(parent)
    return keys


def child_key(parent: BlockKey, packed_tokens: bytes | memoryview) -> BlockKey:
    """Returns the key of the block that follows `parent` and holds `packed_tokens`, one full block (`pack_tokens`)."""
    digest = hashlib.blake2b(parent, digest_size=KEY_BYTES, person=b"moonserve-block")
    digest.update(packed_tokens)
    return BlockKey(digest.digest())


def pack_tokens(token_ids: Sequence[int] | npt.NDArray[np.uint32]) -> bytes:
    """Packs token ids as little-endian uint32, their wire format."""
    return np.asarray(token_ids, dtype=TOKEN_DTYPE).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Unpacks token ids from their wire format. Raises ValueError if the length is not a multiple of 4."""
    tokens: list[int] = np.frombuffer(packed, dtype=TOKEN_DTYPE).tolist()
    return tokens


def pack_keys(keys: Sequence[BlockKey]) -> bytes:
    """Concatenates keys, which is their wire format."""
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[BlockKey]:
    """Unpacks keys from their wire format. Raises ValueError if the length is not a multiple of KEY_BYTES."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a whole number of {KEY_BYTES}-byte block keys")
    return list(iter_keys(packed))


def iter_keys(packed: bytes) -> Iterator[BlockKey]:
    """Yields the keys in `packed`, whose length must be a multiple of KEY_BYTES."""
    for start in range(0, len(packed), KEY_BYTES):
        yield BlockKey(packed[start : start + KEY_BYTES])


# Hashes by which instances are chosen for keys and requests, equal in every process.

WORD_MASK = 2**64 - 1


def digest64(name: str | bytes, seed: int = 0) -> int:
    """Returns a 64-bit digest of a name."""
    data = name if isinstance(name, bytes) else name.encode()
    salt = (seed & WORD_MASK).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=salt).digest(), "little")


def mix64(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mixes words by SplitMix64's finalizer (Steele, Lea and Flood, 2014). Multiplication wraps around."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


# Layout: the shape of the paged KV cache and the offset of each piece of a block.
#
# A *piece* is one block's K or V in one layer: `[block_size, num_kv_heads, head_dim]`, contiguous, tokens outermost.
# The first n tokens of a piece are its first n·token_bytes bytes. In quantised KV, a head of a token consists of its
# codes, one byte each, followed by their scale, a float32. A token is quantised once, when it is written; later writes
# do not change it.
#
# A worker's pool is layer-major: for each layer all K pieces, then all V pieces, so that a kernel sees one tensor
# `[num_blocks, block_size, num_kv_heads, head_dim]`. A stored object is block-major: the block's pieces back to back
# in the order K0 V0 K1 V1 …, which is also the order of a block's checksum.

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
            raise ValueError(f"every dimension of a KV layout must be at least 1: {self}")
        if self.is_quantised and self.head_dim % SCALE_BYTES:
            raise ValueError(f"KV in {self.dtype} needs a head_dim that is a multiple of 4: {self}")

    def of_layers(self, num_layers: int) -> "KvLayout":
        """Returns the layout of blocks with this many layers, as one stage of a pipeline keeps them."""
        return replace(self, num_layers=num_layers)

    @property
    def is_quantised(self) -> bool:
        return self.dtype in QUANTISED_DTYPES

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of a token's K (or V) in one layer."""
        return self.head_dim + SCALE_BYTES if self.is_quantised else self.head_dim * DTYPE_BYTES[self.dtype]

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


# Checksum: XXH3-64, computed by a block's writer and verified by every reader. It protects against corruption, not
# against an adversary; the transfer handshake authenticates peers. XXH3 runs at memory speed, so verification is on by
# default everywhere.


def checksum(pieces: Iterable[memoryview | bytes]) -> int:
    """Returns the XXH3-64 of the concatenation of `pieces`."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


RunningChecksum = xxhash.xxh3_64
"""Incremental form of `checksum` (`update`, `intdigest`) for pieces that become available one after the other."""

_CHECKSUM_BITS = 64


def pack_checksums(parts: Sequence[int]) -> int:
    """Packs the checksums of a block's parts into one number, the first part in the lowest bits.

    Each part is held by another process. The result for a single part is that part's checksum."""
    return sum(part << index * _CHECKSUM_BITS for index, part in enumerate(parts))


def unpack_checksums(packed: int, num_parts: int) -> tuple[int, ...]:
    """Unpacks the checksums that `pack_checksums` packed."""
    return tuple(packed >> index * _CHECKSUM_BITS & (1 << _CHECKSUM_BITS) - 1 for index in range(num_parts))
