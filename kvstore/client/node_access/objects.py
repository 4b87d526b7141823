"""Data types of the client: keys (bytes, or a block of a chain), leased objects, objects to put, results. Pure.

A `Block` holds everything needed to store and find a key of a chain, so that methods need no second parameter.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.disk.base import Pin
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey, checksum
from moonserve.protocol.request import Endpoint
from moonserve.transfer import RemoteSegment

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
    if type(key) is bytes and len(key) <= SHORT_KEY_BYTES:
        stored = _digests.get(key) or _digest_of(key)
    else:
        stored = plain_key(key)
    return Block(stored, stored)


_digests: dict[bytes, BlockKey] = {}
"""Digests of short keys. A plain dictionary: an LRU list would touch more memory per key than all the rest, and a batch
of large values leaves nothing of it in the CPU caches."""


def _digest_of(key: bytes) -> BlockKey:
    if len(_digests) >= KEPT_KEYS:
        _digests.clear()
    stored = _digests[key] = plain_key(key)
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
            self.stored = list(map(_digests.__getitem__, given))  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError):  # a key is new, a Block, or not hashable
            self.stored = [block_of(key).key for key in given]

    def __len__(self) -> int:
        return len(self.stored)

    def blocks(self) -> list[Block]:
        return [block_of(key) for key in self._given]

    def at(self, places: Iterable[int]) -> "Keys":
        """Returns the keys at the given places."""
        return Keys([self._given[place] for place in places])


def _require_several(keys: Sequence[Key]) -> None:
    if isinstance(keys, bytes | bytearray | memoryview | str):
        raise InvalidRequest("a sequence of keys is needed, not one key", param="keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedObject:
    """A leased object and its location in the node's segment."""

    key: BlockKey
    offset: int
    length: int
    checksum: int
    parent: BlockKey | None = None
    tenant: str = ""
    pin: Pin = Pin.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLease:
    """Right to read the leading objects of a list of keys, until it expires or is released."""

    lease_id: str
    store: Endpoint
    segment: RemoteSegment
    objects: tuple[LeasedObject, ...]  # one per leading key that is present
    expires_at: float  # on the caller's monotonic clock; not later than the node's own expiry


@dataclass(frozen=True, slots=True, kw_only=True)
class PutObject:
    """An object to store and its writer's checksum."""

    key: BlockKey
    parent: BlockKey | None  # None = its chain starts here
    checksum: int


class PutItem:
    """An object to store, with the pieces of its value. They must not change while it is stored."""

    __slots__ = ("_checksum", "_pieces", "block")

    def __init__(self, block: Block, *pieces: memoryview) -> None:
        self.block = block
        self._pieces = pieces
        self._checksum: int | None = None

    @property
    def key(self) -> BlockKey:
        return self.block.key

    @property
    def parent(self) -> BlockKey | None:
        return self.block.parent

    @property
    def length(self) -> int:
        return sum(map(len, self._pieces))

    @property
    def checksum(self) -> int:
        """Checksum of the value, computed on first use, ideally while the bytes are being sent."""
        if self._checksum is None:
            self._checksum = checksum(self._pieces)
        return self._checksum


ToPut = PutObject | PutItem


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResult:
    """Number of objects of a put by outcome."""

    stored: int
    present: int  # already stored, or another writer is storing it
    refused: int  # no space could be freed
    corrupt: tuple[BlockKey, ...]  # keys of the objects that did not match their checksum on arrival and were dropped


def require_lengths(lease: ReadLease, slots: BufferSlots) -> None:
    """Raises InvalidRequest unless each leased object fills its slot."""
    for stored, length in zip(lease.objects, slots.lengths.tolist(), strict=True):
        if stored.length != length:
            raise wrong_length(length)


class ReadMiss(Enum):
    """Reason why an object was not read at one node. Not an error: the caller tries another node or asks this one."""

    ABSENT = auto()
    """The node does not have the object."""
    ASK_NODE = auto()
    """Only the node itself can tell, or can bring the object into memory."""
    CORRUPT = auto()
    """The object's bytes do not match its checksum, and it has not changed meanwhile."""


def too_small(length: int, capacity: int) -> InvalidRequest:
    return InvalidRequest(f"the value has {length} bytes, the room for it {capacity}", param="length")


def wrong_length(expected: int) -> InvalidRequest:
    return InvalidRequest(f"an object does not have the {expected} bytes of a block", param="length")
