"""Accounting of the space that a catalog's objects take, updated with each change. Pure.

Its rule: free + held + leased + reserved = capacity. It knows no keys and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.allocator import Allocator, padded
from kvstore.disk.base import DiskSpace
from kvstore.native.base import MAX_OBJECT_BYTES
from kvstore.records import Records
from kvstore.stored import StoredObject, Usage
from protocol.errors import InvalidRequest

Extent = tuple[int | None, int]
"""(offset, length) in memory; offset None = not in memory."""


@dataclass(slots=True, eq=False)
class Remains:
    """Space of an object that was removed while it was held. It is freed when the last hold ends."""

    offset: int | None  # None = was not in memory
    length: int
    holds: int


@dataclass(slots=True, eq=False)
class Books:
    """Counters of bytes and objects. Bytes of memory are padded as by the allocator, bytes of disk as by the disk."""

    space: Allocator
    reserved_bytes: int = 0  # memory being written or loaded
    arriving_bytes: int = 0  # disk space being written
    leased_bytes: int = 0  # memory of objects with a hold
    num_leased: int = 0
    num_on_disk: int = 0  # objects that are only on disk
    num_places: int = 0  # objects with a disk copy
    disk_live: int = 0
    hidden: dict[int, Remains] = field(default_factory=dict)
    """Removed objects with holds, by generation: a key may have several."""

    def let_go_hidden(self, generation: int) -> None:
        """Drops one hold of a removed object. The last one frees its memory."""
        remains = self.hidden[generation]
        remains.holds -= 1
        if not remains.holds:
            del self.hidden[generation]
            if remains.offset is not None:
                self.leased_bytes -= padded(remains.length)
                self.space.free(remains.offset, remains.length)

    def check_size(self, length: int) -> None:
        """Raises InvalidRequest if an object of this length could never fit."""
        if padded(length) > self.space.capacity or length > MAX_OBJECT_BYTES:
            raise InvalidRequest(
                f"an object of {length} bytes does not fit into this store's segment of {self.space.capacity} bytes",
                param="length",
            )

    @property
    def evictable_bytes(self) -> int:
        """Bytes of memory that are free or taken by objects without a hold."""
        return self.space.capacity - self.leased_bytes - self.reserved_bytes

    def disk_free(self, disk: DiskSpace | None) -> int:
        """Returns the live bytes that the disk may still take."""
        return disk.live_limit - self.disk_live - self.arriving_bytes if disk else 0

    def usage(self, num_objects: int, disk: DiskSpace | None, tenants: Mapping[str, int]) -> Usage:
        return Usage(
            capacity_bytes=self.space.capacity,
            free_bytes=self.space.free_bytes,
            held_bytes=self.space.used - self.leased_bytes - self.reserved_bytes,
            leased_bytes=self.leased_bytes,
            reserved_bytes=self.reserved_bytes,
            disk_limit_bytes=disk.live_limit if disk else 0,
            disk_live_bytes=self.disk_live,
            num_objects=num_objects,
            num_leased=self.num_leased,
            num_on_disk=self.num_on_disk,
            tenant_bytes=tenants,
        )

    def validate(
        self,
        visible: Sequence[StoredObject],
        rows: Records,
        disk: DiskSpace | None,
        *,
        writing: Sequence[Extent],
        loading: Sequence[Extent],
    ) -> None:
        """Raises AssertionError unless the counters match exactly the visible objects and these extents."""
        here = [(o.offset, o.length) for o in visible]
        remains = self.hidden.values()
        hidden = [(r.offset, r.length) for r in remains if r.offset is not None]
        taken = [*here, *writing, *hidden, *loading]
        self.space.validate((at, length) for at, length in taken if at is not None)
        leased = [o for o in visible if rows.holds[o.record]]
        assert self.num_leased == len(leased)
        assert self.leased_bytes == sum(o.space for o in leased if o.offset is not None) + sum(
            padded(length) for _, length in hidden
        )
        assert self.reserved_bytes == sum(padded(length) for _, length in (*writing, *loading))
        assert self.num_on_disk == sum(o.offset is None for o in visible)
        on_disk = [o for o in visible if o.place is not None]
        space = disk.space if disk else (lambda length: 0)
        assert self.disk_live == sum(space(o.length) for o in on_disk)
        assert self.num_places == len(on_disk)
        assert all(o.offset is not None or o.place is not None for o in visible)
