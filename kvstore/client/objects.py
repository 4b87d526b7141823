"""Objects at store nodes as a client names them: those under a read lease, those to put, and what became of each."""

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
    """One object as it lies in the node's segment."""

    key: BlockKey
    offset: int
    length: int
    checksum: int
    parent: BlockKey | None = None
    tenant: str = ""
    pin: Pin = Pin.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLease:
    """The right to read the leading objects of a list of keys until it expires or is released."""

    lease_id: str
    store: Endpoint
    segment: RemoteSegment
    objects: tuple[LeasedObject, ...]  # of the leading keys that are present
    expires_at: float  # event loop's clock; not later than the node thinks


@dataclass(frozen=True, slots=True, kw_only=True)
class PutObject:
    """An object to store, and its checksum as made by its writer."""

    key: BlockKey
    parent: BlockKey | None  # None = its chain starts here
    checksum: int


class Item:
    """An object to store, as its writer gave it; nobody changes it meanwhile."""

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
        """Made when it is first asked for, best while the bytes are on their way."""
        if self._checksum is None:
            self._checksum = checksum([self._value])
        return self._checksum


ToPut = PutObject | Item


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResult:
    """What became of each object of a put."""

    stored: int
    present: int  # it was there already, or another writer is storing it
    refused: int  # no space that could be had
    corrupt: tuple[BlockKey, ...]  # arrived with another checksum and were dropped


def require_lengths(lease: ReadLease, spots: Spots) -> None:
    """Raises InvalidRequest unless each leased object fills its spot."""
    for stored, length in zip(lease.objects, spots.lengths.tolist(), strict=True):
        if stored.length != length:
            raise wrong_length(length)


class Fate(Enum):
    """Why one object was not read at one node. No error: the caller goes on elsewhere, or asks."""

    ABSENT = auto()
    """The node has it not."""
    ASK = auto()
    """Only the node itself can tell, or bring it to memory."""
    CORRUPT = auto()
    """Its bytes do not match its checksum, and it has not changed meanwhile."""


def too_small(length: int, capacity: int) -> InvalidRequest:
    return InvalidRequest(f"the value has {length} bytes, the room for it {capacity}", param="length")


def wrong_length(expected: int) -> InvalidRequest:
    return InvalidRequest(f"an object does not have the {expected} bytes of a block", param="length")
