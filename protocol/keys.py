"""Block keys: chained identities of blocks of tokens, valid in the whole cluster.

A key commits to the model's fingerprint, the tenant's salt and every token up to the end of its block, so equal keys
mean equal KV. The hash is BLAKE2b and not a faster one, because tenants choose the tokens and a collision would give
one tenant the cache of another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NewType

import numpy as np
import numpy.typing as npt

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
