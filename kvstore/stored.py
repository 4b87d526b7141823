"""What a catalog and its users speak of: objects, wishes for some, usage. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvstore.allocator import padded
from kvstore.disk.base import DiskObject, Pin, Place
from kvstore.native.base import NO_RECORD, Record
from protocol.keys import BlockKey


class Tier(StrEnum):
    """The fastest copy that a node has of an object."""

    MEMORY = "memory"
    DISK = "disk"


class Announcements(Protocol):
    """Who wants to know what this node can serve."""

    def added(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None: ...

    def moved(self, key: BlockKey, tier: Tier) -> None:
        """The fastest copy of `key` is in another tier now."""

    def removed(self, key: BlockKey) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """An object that a writer wants to store."""

    key: BlockKey
    parent: BlockKey | None
    length: int
    tenant: str = ""
    pin: Pin = Pin.NONE
    second_hand: bool = False  # it is a copy of another node's object


@dataclass(slots=True, eq=False)
class StoredObject:
    """A snapshot. While the object is held, what it says of memory stays true."""

    key: BlockKey
    parent: BlockKey | None  # None = its chain starts here
    length: int
    generation: int  # never given to another object of this node
    tenant: str = ""
    pin: Pin = Pin.NONE
    checksum: int = 0  # known once it is visible
    offset: int | None = None  # in the segment; None = not in memory
    place: Place | None = None  # on disk; None = nowhere
    record: Record = NO_RECORD  # of a visible one
    second_hand: bool = False  # a copy of another node's; known while it is being written

    @property
    def space(self) -> int:
        """Bytes of the segment that it takes while it is in memory."""
        return padded(self.length)

    @property
    def tier(self) -> Tier:
        return Tier.DISK if self.offset is None else Tier.MEMORY

    def bytes_in(self, memory: memoryview) -> memoryview:
        """Of one that is in memory: `memory` is the segment's."""
        assert self.offset is not None
        return memory[self.offset : self.offset + self.length]

    def header(self) -> DiskObject:
        """What the disk keeps of it beside its bytes."""
        return DiskObject(
            key=self.key,
            parent=self.parent,
            length=self.length,
            checksum=self.checksum,
            generation=self.generation,
            tenant=self.tenant,
            pin=self.pin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """Above `evict_above` of the memory in use, objects are demoted or evicted until `evict_share` of it is free."""

    evict_above: float = 0.90
    evict_share: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of memory: free + held + leased + reserved = capacity. And of disk."""

    capacity_bytes: int
    free_bytes: int
    held_bytes: int  # visible, without a lease
    leased_bytes: int  # with one, removed objects under a reader included; and those being copied to disk
    reserved_bytes: int  # being written, or read from disk
    disk_limit_bytes: int  # live bytes that the disk may hold; 0 = there is no disk
    disk_live_bytes: int  # of visible objects, headers and padding included
    num_objects: int  # visible
    num_leased: int  # of them
    num_on_disk: int  # of them, only on disk
    tenant_bytes: Mapping[str, int]  # bytes of the objects of each tenant that has a quota
