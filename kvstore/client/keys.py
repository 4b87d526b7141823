"""Keys of the client's methods: plain bytes, or a block of a chain. Pure.

One value holds everything needed to store and find a key, so that methods need no second parameter for chains. Knows
neither nodes nor values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from protocol.errors import InvalidRequest
from protocol.keys import KEY_BYTES, BlockKey

MAX_PLAIN_KEY_BYTES = 64 * 1024
SHORT_KEY_BYTES = 128
KEPT_KEYS = 16_384
"""Cached digests of short keys: a few MiB. Hashing is most of the cost of finding a key on this host."""
_EMPTY = hashlib.blake2b(digest_size=KEY_BYTES, person=b"moonserve-plain")


class Block(NamedTuple):
    """A block of a chain. Create blocks with `chain`."""

    key: BlockKey
    head: BlockKey
    """First key of the chain, which decides the chain's home node."""
    parent: BlockKey | None = None
    """None = the chain starts here."""


Key = bytes | Block
"""Bytes are a plain key of at most 64 KiB, stored under its digest, even if they happen to be a `BlockKey`."""


def chain(keys: Sequence[BlockKey]) -> list[Block]:
    """Returns the blocks of a whole chain, first key first, each after its parent."""
    parents: Iterable[BlockKey | None] = [None, *keys]
    return [Block(key, keys[0], parent) for key, parent in zip(keys, parents, strict=False)]


def plain_key(key: bytes) -> BlockKey:
    """Returns the block key that stores a plain key of up to 64 KiB: its BLAKE2b digest, separate from all chains."""
    if len(key) > MAX_PLAIN_KEY_BYTES:
        raise InvalidRequest(f"a key has at most {MAX_PLAIN_KEY_BYTES} bytes, not {len(key)}", param="key")
    digest = _EMPTY.copy()  # half the cost of a new one
    digest.update(key)
    return BlockKey(digest.digest())


def block_of(key: Key) -> Block:
    """Returns the block of a key. Raises InvalidRequest for an invalid key."""
    if type(key) is Block:
        return key
    # Exact types first: these checks are much of the cost of a small get.
    if type(key) is not bytes and not isinstance(key, bytes | bytearray | memoryview):
        raise InvalidRequest(f"a key is bytes or a Block, not {type(key).__name__}", param="key")
    stored = _stored(key)
    return Block(stored, stored)


def _stored(key: bytes) -> BlockKey:
    if type(key) is bytes and len(key) <= SHORT_KEY_BYTES:
        return _known.get(key) or _remembered(key)
    return plain_key(key)


_known: dict[bytes, BlockKey] = {}
"""Digests of short keys. A plain dictionary: an LRU list would touch more memory per key than all the rest, and a batch
of large values leaves nothing of it in the CPU caches."""


def _remembered(key: bytes) -> BlockKey:
    if len(_known) >= KEPT_KEYS:
        _known.clear()
    stored = _known[key] = plain_key(key)
    return stored


def blocks_of(keys: Sequence[Key]) -> list[Block]:
    """Returns the blocks of several keys. Raises InvalidRequest for a single key, and as `block_of`."""
    _require_several(keys)
    return [block_of(key) for key in keys]


class Keys:
    """Keys of one call as they are stored, and as blocks where their home nodes are needed."""

    __slots__ = ("_given", "stored")

    def __init__(self, given: Sequence[Key]) -> None:
        """Raises as `blocks_of`."""
        _require_several(given)
        self._given = given
        try:
            # An object equal to a known key has the same digest. This costs half a microsecond per key for 32 large
            # values.
            self.stored = list(map(_known.__getitem__, given))  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError):  # a key is new, a Block, or not hashable
            self.stored = [block_of(key).key for key in given]

    def __len__(self) -> int:
        return len(self.stored)

    def blocks(self) -> list[Block]:
        return [block_of(key) for key in self._given]

    def at(self, places: Iterable[int]) -> Keys:
        """Returns the keys at the given places."""
        return Keys([self._given[place] for place in places])


def _require_several(keys: Sequence[Key]) -> None:
    if isinstance(keys, bytes | bytearray | memoryview | str):
        raise InvalidRequest("a sequence of keys is needed, not one key", param="keys")
