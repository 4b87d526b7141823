"""Data types of the catalog and its users: stored objects, requests to store, usage. Pure."""

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
    """Where a node's fastest copy of an object is."""

    MEMORY = "memory"
    DISK = "disk"


class Announcements(Protocol):
    """Callbacks for changes of the objects that a node can serve."""

    def added(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None: ...

    def moved(self, key: BlockKey, tier: Tier) -> None:
        """Called when the fastest copy of `key` is in another tier."""

    def removed(self, key: BlockKey) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A writer's request to store one object."""

    key: BlockKey
    parent: BlockKey | None
    length: int
    tenant: str = ""
    pin: Pin = Pin.NONE
    second_hand: bool = False  # copied from another node


@dataclass(slots=True, eq=False)
class StoredObject:
    """A snapshot of an object. While the object is held, its place in memory stays valid."""

    key: BlockKey
    parent: BlockKey | None  # None = its chain starts here
    length: int
    generation: int  # never reused by this node
    tenant: str = ""
    pin: Pin = Pin.NONE
    checksum: int = 0  # set once the object is visible
    offset: int | None = None  # in the segment; None = not in memory
    place: Place | None = None  # on disk; None = not there
    record: Record = NO_RECORD  # set while the object is visible
    second_hand: bool = False  # copied from another node; only set while it is being written

    @property
    def space(self) -> int:
        """Bytes of the segment that the object takes while it is in memory."""
        return padded(self.length)

    @property
    def tier(self) -> Tier:
        return Tier.DISK if self.offset is None else Tier.MEMORY

    def bytes_in(self, memory: memoryview) -> memoryview:
        """Returns the object's bytes in `memory`, the segment's buffer. The object must be in memory."""
        assert self.offset is not None
        return memory[self.offset : self.offset + self.length]

    def header(self) -> DiskObject:
        """Returns the metadata that the disk stores with the object's bytes."""
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
    """Shares of memory. When use exceeds `evict_above`, objects are demoted or evicted until use has fallen to
    `evict_above - evict_share`."""

    evict_above: float = 0.90
    evict_share: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Use of memory and disk. In memory, free + held + leased + reserved = capacity."""

    capacity_bytes: int
    free_bytes: int
    held_bytes: int  # of visible objects without a hold
    leased_bytes: int  # of objects with a hold: a lease, also of a removed object, or a copy to disk in flight
    reserved_bytes: int  # being written, or being read from disk
    disk_limit_bytes: int  # live bytes that the disk may hold; 0 = no disk
    disk_live_bytes: int  # of visible objects, headers and padding included
    num_objects: int  # visible
    num_leased: int  # with a hold, removed objects included
    num_on_disk: int  # visible and only on disk
    tenant_bytes: Mapping[str, int]  # only tenants with a quota
