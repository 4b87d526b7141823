"""The SSD tier as the rest of a node sees it: durable objects at places, in a folder of segment files.

What was written outlasts the process when the write returns, and a loss of power soon afterwards; what was forgotten
outlasts both at once. A block that had not become durable when power was lost is missed. A place stays valid until it
is released, or until the tier moves its object elsewhere to reclaim space, and says so. Which objects are worth keeping
is the catalog's business.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from protocol.keys import BlockKey

PAGE = 4096
"""Bytes; every place and every length on disk is a multiple of it, as O_DIRECT wants."""

Place = NewType("Place", int)
"""Where an object's header lies: segment number << 32 | page within the segment."""


class Pin(StrEnum):
    """How much an object may be evicted."""

    NONE = "none"
    SOFT = "soft"  # after everything that has no pin
    HARD = "hard"  # never


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskObject:
    """What a header says of its object."""

    key: BlockKey
    parent: BlockKey | None
    length: int
    checksum: int
    generation: int  # grows within a node, over restarts too: of two objects with one key, the later one counts
    tenant: str = ""
    pin: Pin = Pin.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWrite:
    """An object to write; `memory` does not change until the write returns."""

    object: DiskObject
    memory: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRead:
    """An object to read into `memory`, which is as long as the object."""

    object: DiskObject
    place: Place
    memory: memoryview


class Health(StrEnum):
    """What can still be asked of the disk."""

    GOOD = "good"
    READ_ONLY = "read-only"  # writes are refused, what is there is served
    FAILED = "failed"  # neither, or it does not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """Bytes; live + dead + free = capacity, headers and padding included."""

    capacity: int
    live: int
    dead: int  # reclaimed once their segment's live objects have moved
    free: int


class DiskSpace(Protocol):
    """What the catalog asks of a disk."""

    def space(self, length: int) -> int:
        """Bytes of disk that an object of `length` bytes takes."""

    def takes(self, length: int) -> bool:
        """Whether an object of `length` bytes can be written at all: it has to fit into one segment."""

    @property
    def live_limit(self) -> int:
        """Live bytes above which writes may be refused for want of a segment to move objects into."""

    def release(self, place: Place) -> None:
        """The object there is no longer wanted. It may come back after a restart: `DiskTier.forget` prevents that."""


class DiskTier(DiskSpace, Protocol):
    """One folder. All methods belong to one event loop; none blocks it."""

    @property
    def health(self) -> Health: ...

    def usage(self) -> DiskUsage: ...

    @property
    def counters(self) -> Mapping[str, int]:
        """What happened since it was opened, for metrics."""

    def recover(self, progress: Callable[[float], None]) -> AsyncIterator[list[tuple[DiskObject, Place]]]:
        """What the folder holds, in pieces, as it is found. Call it once, before the first write.

        Of copies of one object only one is given; an older generation of a key may come before or after a newer one.
        Torn and corrupt tails are cut off, counted and logged. `progress` is told the share that is done.
        """

    async def write(self, writes: Sequence[DiskWrite]) -> list[Place | None]:
        """On disk on return, durable at the latest a configured interval later; None where there was no space, or the
        disk failed or did not answer in time. Never raises for the disk's sake."""

    async def read(self, reads: Sequence[DiskRead]) -> list[bool]:
        """Whether each object now lies in its memory: its header says so and its bytes match their checksum.

        On a disk that does not answer it may take as long as that lasts, since the disk may still write to the memory.
        """

    async def forget(self, objects: Sequence[DiskObject]) -> bool:
        """Durably, if it gives True: these objects, and earlier ones of the same keys, are not found by `recover` any
        more.

        Their places are released as others are. When the disk fails or is full, that is made up for once it is well.
        """

    async def repin(self, changes: Sequence[DiskObject]) -> None:
        """Durably: what was written under these keys has these pins, if its generation is earlier than the one here,
        which is as new as that of an object. When the disk fails, it is made up for once it is well again."""

    async def close(self) -> None:
        """Waits for what is under way, but not for a disk that does not answer."""


Moved = Callable[[DiskObject, Place, Place], bool]
"""Called in the event loop when the tier has moved an object (object, from, to): whether anybody still wants it there.
What was released or forgotten meanwhile is not wanted; then it is not found by `recover` either."""

HealthChanged = Callable[[Health, str], None]
"""Called in the event loop with the new health and a sentence that says why."""

Sleep = Callable[[float], Awaitable[None]]
