"""Data types of the catalog and its users: stored objects, requests, moves between tiers, and the rights that a node
grants: reservations to writers, leases to readers. Pure.

`kvstore.state.reservations` and `kvstore.state.leases` grant and end the rights. A reservation is open until it is
committed or given up (`ReservationPhase`). **Its space is never free while its write window is open**: a commit and an
abort both close the window first, which the shell does and reports.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Generic, Protocol, TypeVar

from moonserve.kvstore.disk.base import DiskObject, Pin, Place
from moonserve.kvstore.disk.io.format import MAX_TENANT_BYTES
from moonserve.kvstore.index_layout import NO_RECORD, Record
from moonserve.kvstore.state.allocator import padded
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import NO_HINTS, CacheHints


class Tier(StrEnum):
    """Where a node's fastest copy of an object is."""

    MEMORY = "memory"
    DISK = "disk"


class ObjectListener(Protocol):
    """Callbacks for changes of the objects that a node can serve."""

    def added(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None: ...

    def moved(self, key: BlockKey, tier: Tier) -> None:
        """Called when the fastest copy of `key` is in another tier."""

    def removed(self, key: BlockKey) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRequest:
    """A writer's request to store one object."""

    key: BlockKey
    parent: BlockKey | None
    length: int
    tenant: str = ""
    pin: Pin = Pin.NONE
    is_copied: bool = False  # copied from another node
    hints: CacheHints = NO_HINTS


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
    is_copied: bool = False  # copied from another node; only set while it is being written
    hints: CacheHints = NO_HINTS  # only set while it is being written

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


MAX_TTL_S = 600.0


class PutOutcome(IntEnum):
    """The result of one request of a writer. Numbers as in kvstore.proto; the last two only occur in inline puts."""

    GRANTED = STORED = 1  # space is reserved; for an inline put, the object is stored
    PRESENT = 2
    IN_PROGRESS = 3  # another writer is storing it
    FULL = 4  # nothing could be evicted
    CORRUPT = 5  # the bytes did not match the checksum, and were dropped
    LATER = 6  # there will be space soon: use the RPC, which waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The node's answer to one request."""

    outcome: PutOutcome
    offset: int = 0  # set if GRANTED


class ReservationPhase(StrEnum):
    """The phase of a live reservation. Of ended ones only the id is remembered."""

    OPEN = "open"  # its window is open
    COMMITTING = "committing"  # window being closed, then bytes verified
    CLOSING = "closing"  # aborted or expired: window being closed, then space freed
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Reservation:
    """A writer's right to write into reserved space."""

    reservation_id: str
    requests: tuple[PutRequest, ...]
    slots: tuple[Slot, ...]  # one per request
    objects: dict[BlockKey, StoredObject]  # the granted ones
    expires_at: float
    window_id: int | None = None  # set once the shell has opened it; None = nothing to write
    phase: ReservationPhase = ReservationPhase.OPEN
    checksums: Mapping[BlockKey, int] = field(default_factory=dict)  # set when COMMITTING

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(offset, length) of the memory that may be written; empty objects need none."""
        return [(o.offset, o.length) for o in self.objects.values() if o.length and o.offset is not None]

    @property
    def waits_for_others(self) -> bool:
        """True if nothing was granted and the end of another writer could change the answer."""
        return not self.objects and any(s.outcome is PutOutcome.IN_PROGRESS for s in self.slots)

    def advance(self, before: ReservationPhase, after: ReservationPhase) -> None:
        if self.phase is not before:
            raise AssertionError(f"{self.reservation_id} is {self.phase}, not {before}")
        self.phase = after


@dataclass(slots=True, eq=False)
class DiskWriteMove:
    """An object being written to disk. The shell writes it and calls `TierMoves.write_ended`."""

    object: StoredObject
    demote: bool  # the object leaves memory afterwards
    disk_bytes: int


@dataclass(slots=True, eq=False)
class DiskReadMove:
    """An object being read from disk into `offset`. The shell reads it and calls `TierMoves.read_ended`."""

    object: StoredObject
    offset: int


@dataclass(slots=True, eq=False)
class Lease:
    """A reader's right to find objects unchanged in their place."""

    lease_id: str
    objects: tuple[StoredObject, ...]
    expires_at: float
    loads: tuple[DiskReadMove, ...] = ()  # for the shell to start; without those already in flight


def check_ttl(ttl_s: float) -> None:
    """Raises InvalidRequest unless 0 < ttl_s <= MAX_TTL_S."""
    if not 0 < ttl_s <= MAX_TTL_S:
        raise InvalidRequest(f"ttl_s must be above 0 and at most {MAX_TTL_S:g}, not {ttl_s}", param="ttl_s")


def check_tenant(tenant: str) -> None:
    """Raises InvalidRequest for a name that the disk format cannot store, so that the put fails, not the demotion."""
    try:
        nbytes = len(tenant.encode())
    except (UnicodeEncodeError, AttributeError) as error:
        raise InvalidRequest(f"{tenant!r} is not the name of a tenant", param="tenant") from error
    if nbytes > MAX_TENANT_BYTES:
        raise InvalidRequest(f"a tenant's name has at most {MAX_TENANT_BYTES} bytes, not {nbytes}", param="tenant")


Result = TypeVar("Result")

ENDED_IDS_KEPT_S = 60.0  # longer than the deadline of any call that might still arrive


class ExpiryHeap:
    """Heap of the expiry times of rights. `expires_at` returns a right's current expiry, None if it has none.

    Outdated entries stay in the heap and are skipped when they reach its top.
    """

    def __init__(self, expires_at: Callable[[str], float | None]) -> None:
        self._expires_at = expires_at
        self._heap: list[tuple[float, str]] = []

    def add(self, right_id: str, at: float) -> None:
        """Notes that `right_id` now expires at `at`."""
        heapq.heappush(self._heap, (at, right_id))

    def next(self) -> float | None:
        """Returns the earliest expiry; None if there is none."""
        while self._heap:
            at, right_id = self._heap[0]
            if self._expires_at(right_id) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def due(self, now: float) -> Iterator[str]:
        """Removes and yields the rights that have expired at `now`. The caller ends each before it takes the next."""
        while (at := self.next()) is not None and at <= now:
            yield heapq.heappop(self._heap)[1]

    def __contains__(self, right_id: str) -> bool:
        return (self._expires_at(right_id), right_id) in self._heap


class EndedIds(Generic[Result]):
    """Remembers the ids of ended rights for ENDED_IDS_KEPT_S, with their results if they have one."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[float, Result | None]] = {}  # oldest first

    def add(self, right_id: str, now: float, result: Result | None = None) -> None:
        """Notes that `right_id` ended at `now`. The first result of an id is kept."""
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest][0] > now:
                break
            del self._entries[oldest]
        self._entries.setdefault(right_id, (now + ENDED_IDS_KEPT_S, result))

    def __contains__(self, right_id: str) -> bool:
        return right_id in self._entries

    def result(self, right_id: str) -> Result | None:
        """Returns the result of an id; None if it has none or is unknown."""
        _, result = self._entries.get(right_id, (0.0, None))
        return result
