"""Data types for objects at store nodes: objects under a read lease, objects to put, and the result for each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from kvstore.client.keys import Block
from kvstore.client.spots import Spots
from kvstore.disk.base import Pin
from protocol.checksum import checksum
from protocol.errors import InvalidRequest
from protocol.keys import BlockKey
from protocol.request import Endpoint
from transfer import RemoteSegment


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


class Item:
    """An object to store, with its value. The value must not change while it is stored."""

    __slots__ = ("_checksum", "_value", "block")

    def __init__(self, block: Block, value: memoryview) -> None:
        self.block = block
        self._value = value
        self._checksum: int | None = None

    @property
    def key(self) -> BlockKey:
        return self.block.key

    @property
    def parent(self) -> BlockKey | None:
        return self.block.parent

    @property
    def length(self) -> int:
        return len(self._value)

    @property
    def checksum(self) -> int:
        """Checksum of the value, computed on first use, ideally while the bytes are being sent."""
        if self._checksum is None:
            self._checksum = checksum([self._value])
        return self._checksum


ToPut = PutObject | Item


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResult:
    """Number of objects of a put by outcome."""

    stored: int
    present: int  # already stored, or another writer is storing it
    refused: int  # no space could be freed
    corrupt: tuple[BlockKey, ...]  # keys of the objects that did not match their checksum on arrival and were dropped


def require_lengths(lease: ReadLease, spots: Spots) -> None:
    """Raises InvalidRequest unless each leased object fills its spot."""
    for stored, length in zip(lease.objects, spots.lengths.tolist(), strict=True):
        if stored.length != length:
            raise wrong_length(length)


class Fate(Enum):
    """Reason why an object was not read at one node. Not an error: the caller tries another node or asks this one."""

    ABSENT = auto()
    """The node does not have the object."""
    ASK = auto()
    """Only the node itself can tell, or can bring the object into memory."""
    CORRUPT = auto()
    """The object's bytes do not match its checksum, and it has not changed meanwhile."""


def too_small(length: int, capacity: int) -> InvalidRequest:
    return InvalidRequest(f"the value has {length} bytes, the room for it {capacity}", param="length")


def wrong_length(expected: int) -> InvalidRequest:
    return InvalidRequest(f"an object does not have the {expected} bytes of a block", param="length")
