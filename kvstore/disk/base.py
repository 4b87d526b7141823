"""Interface of the SSD tier: durable objects at places, in a folder of segment files.

A written object survives the end of the process once the write returns, and a power loss shortly afterwards. A removal
survives both once it returns. An object that was not durable at a power loss is a miss. A place stays valid until it is
released, or until the tier moves its object to reclaim space and reports the move. The catalog decides which objects
are worth keeping.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from moonserve.protocol.kv_blocks import BlockKey

PAGE = 4096
"""Bytes of a page. Every place and every length on disk is a multiple of it, as O_DIRECT requires."""

Place = NewType("Place", int)
"""Location of an object's header: segment number << 32 | page within the segment."""


class Pin(StrEnum):
    """How far an object is protected from eviction."""

    NONE = "none"
    SOFT = "soft"  # evicted after all objects without a pin
    HARD = "hard"  # never evicted


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskObject:
    """Metadata of an object, as stored in its header."""

    key: BlockKey
    parent: BlockKey | None
    length: int
    checksum: int
    generation: int  # increases within a node, also over restarts; the highest generation of a key counts
    tenant: str = ""
    pin: Pin = Pin.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWrite:
    """An object to write. `memory` must not change until the write returns."""

    object: DiskObject
    memory: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRead:
    """An object to read into `memory`, which has the object's length."""

    object: DiskObject
    place: Place
    memory: memoryview


class Health(StrEnum):
    """Which operations the disk can still serve."""

    GOOD = "good"
    READ_ONLY = "read-only"  # writes are refused, reads are served
    FAILED = "failed"  # reads and writes are refused; the disk fails or does not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """Disk usage in bytes, with headers and padding: live + dead + free = capacity."""

    capacity: int
    live: int
    dead: int  # reclaimed once the live objects of their segment have moved
    free: int


class DiskSpace(Protocol):
    """The part of a disk tier that the catalog uses."""

    def space(self, length: int) -> int:
        """Returns the bytes of disk that an object of `length` bytes takes."""

    def takes(self, length: int) -> bool:
        """True if an object of `length` bytes can be written at all: it must fit into one segment."""

    @property
    def live_limit(self) -> int:
        """Live bytes above which writes may be refused because compaction has no free segment."""

    def release(self, place: Place) -> None:
        """Releases an object that is no longer needed. A restart may bring it back unless `DiskTier.forget` is used."""


class DiskTier(DiskSpace, Protocol):
    """Disk tier over one folder. All methods belong to one event loop; none blocks it."""

    @property
    def health(self) -> Health: ...

    def usage(self) -> DiskUsage: ...

    @property
    def counters(self) -> Mapping[str, int]:
        """Event counts since the tier was opened, for metrics."""

    def recover(self, progress: Callable[[float], None]) -> AsyncIterator[list[tuple[DiskObject, Place]]]:
        """Yields the folder's objects in batches as they are found. Call it once, before the first write.

        Of several copies of one object only one is yielded; an older generation of a key may come before or after a
        newer one. Torn and corrupt tails are cut off, counted and logged. `progress` receives the share that is done.
        """

    async def write(self, writes: Sequence[DiskWrite]) -> list[Place | None]:
        """Writes objects and returns their places: on disk on return, durable within a configured interval. A place is
        None if there was no space, or the disk failed or did not answer in time. Disk errors are never raised."""

    async def read(self, reads: Sequence[DiskRead]) -> list[bool]:
        """Reads objects and returns True for each whose header matches and whose bytes match their checksum.

        On a disk that does not answer, this may wait as long as the disk, which may still write to the memory.
        """

    async def forget(self, objects: Sequence[DiskObject]) -> bool:
        """Forgets objects and earlier generations of their keys, so that `recover` does not find them. Returns True if
        that is durable.

        Their places are released like any others. If the disk fails or is full, this is made up for once it is well.
        """

    async def repin(self, changes: Sequence[DiskObject]) -> None:
        """Changes durably the pins of stored objects. A change applies to generations of its key up to its own, which
        comes from the objects' counter. If the disk fails, the change is made up for once it is well."""

    async def close(self) -> None:
        """Waits for operations in flight, but not for a disk that does not answer."""


Moved = Callable[[DiskObject, Place, Place], bool]
"""Called in the event loop after the tier has moved an object (object, from, to). Returns True if the object is still
needed there. One that was released or forgotten meanwhile is not, and `recover` does not find it either."""

HealthChanged = Callable[[Health, str], None]
"""Called in the event loop with the new health and a sentence with the reason."""

Sleep = Callable[[float], Awaitable[None]]
