"""What the client's methods take as a key: plain bytes, or a block of a chain. Pure.

Its rule: one value says everything about a key that storing and finding need, so that no method has a second
parameter for chains. Knows neither nodes nor values.
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
"""Short keys whose digests are remembered: a few MiB. Hashing is most of what finding a key on this host costs."""
_EMPTY = hashlib.blake2b(digest_size=KEY_BYTES, person=b"moonserve-plain")


class Block(NamedTuple):
    """A block of a chain. Make them with `chain`."""

    key: BlockKey
    head: BlockKey
    """The first key of its chain, which decides where the chain is at home."""
    parent: BlockKey | None = None
    """None = the chain starts here."""


Key = bytes | Block
"""Bytes are a plain key of at most 64 KiB, stored under its digest; also when they happen to be a `BlockKey`."""


def chain(keys: Sequence[BlockKey]) -> list[Block]:
    """The blocks of a whole chain, first key first, each after its parent."""
    parents: Iterable[BlockKey | None] = [None, *keys]
    return [Block(key, keys[0], parent) for key, parent in zip(keys, parents, strict=False)]


def plain_key(key: bytes) -> BlockKey:
    """The block key under which a plain key of up to 64 KiB is stored: its BLAKE2b digest, apart from all chains."""
    if len(key) > MAX_PLAIN_KEY_BYTES:
        raise InvalidRequest(f"a key has at most {MAX_PLAIN_KEY_BYTES} bytes, not {len(key)}", param="key")
    digest = _EMPTY.copy()  # half the price of a new one
    digest.update(key)
    return BlockKey(digest.digest())


def block_of(key: Key) -> Block:
    """Raises InvalidRequest for what is no key."""
    if type(key) is Block:
        return key
    # Exact types first: this is a good part of what a small get costs.
    if type(key) is not bytes and not isinstance(key, bytes | bytearray | memoryview):
        raise InvalidRequest(f"a key is bytes or a Block, not {type(key).__name__}", param="key")
    stored = _stored(key)
    return Block(stored, stored)


def _stored(key: bytes) -> BlockKey:
    if type(key) is bytes and len(key) <= SHORT_KEY_BYTES:
        return _known.get(key) or _remembered(key)
    return plain_key(key)


_known: dict[bytes, BlockKey] = {}
"""Under which short keys are stored. A plain dictionary: a list of what was used last would be more memory to touch per
key than all the rest, and a batch of large values leaves nothing of it in the caches."""


def _remembered(key: bytes) -> BlockKey:
    if len(_known) >= KEPT_KEYS:
        _known.clear()
    stored = _known[key] = plain_key(key)
    return stored


def blocks_of(keys: Sequence[Key]) -> list[Block]:
    """Raises InvalidRequest for one key instead of several, and as `block_of`."""
    _require_several(keys)
    return [block_of(key) for key in keys]


class Keys:
    """The keys of one call, as they are stored; as blocks when somebody must know where they are at home."""

    __slots__ = ("_given", "stored")

    def __init__(self, given: Sequence[Key]) -> None:
        """Raises as `blocks_of`."""
        _require_several(given)
        self._given = given
        try:
            # Whatever equals a known key has its digest. A call for 32 large values is half a microsecond per key.
            self.stored = list(map(_known.__getitem__, given))  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError):  # one is new, a Block, or nothing that has a hash
            self.stored = [block_of(key).key for key in given]

    def __len__(self) -> int:
        return len(self.stored)

    def blocks(self) -> list[Block]:
        return [block_of(key) for key in self._given]

    def at(self, places: Iterable[int]) -> Keys:
        """Some of them."""
        return Keys([self._given[place] for place in places])


def _require_several(keys: Sequence[Key]) -> None:
    if isinstance(keys, bytes | bytearray | memoryview | str):
        raise InvalidRequest("a sequence of keys is needed, not one key", param="keys")
