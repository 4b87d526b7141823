"""Data types of the rights that a store node grants: reservations to writers, leases to readers. Pure.

`kvstore.writing` and `kvstore.reading` grant and end them. A reservation is open until it is committed or given up
(`Phase`). **Its space is never free while its write window is open**: a commit and an abort both close the window
first, which the shell does and reports.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Generic, TypeVar

from kvstore.disk.format import MAX_TENANT_BYTES
from kvstore.moves import Load
from kvstore.stored import StoredObject, Wish
from protocol.errors import InvalidRequest
from protocol.keys import BlockKey

MAX_TTL_S = 600.0


class Outcome(IntEnum):
    """The result of one wish of a writer. Numbers as in kvstore.proto; the last two only occur in express puts."""

    GRANTED = STORED = 1  # space is reserved; for an express put, the object is stored
    PRESENT = 2
    IN_PROGRESS = 3  # another writer is storing it
    FULL = 4  # nothing could be evicted
    CORRUPT = 5  # the bytes did not match the checksum, and were dropped
    LATER = 6  # there will be space soon: use the RPC, which waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The node's answer to one wish."""

    outcome: Outcome
    offset: int = 0  # set if GRANTED


class Phase(StrEnum):
    """The phase of a live reservation. Of ended ones only the id is remembered."""

    OPEN = "open"  # its window is open
    COMMITTING = "committing"  # window being closed, then bytes verified
    CLOSING = "closing"  # aborted or expired: window being closed, then space freed
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Reservation:
    """A writer's right to write into reserved space."""

    reservation_id: str
    wishes: tuple[Wish, ...]
    slots: tuple[Slot, ...]  # one per wish
    objects: dict[BlockKey, StoredObject]  # the granted ones
    expires_at: float
    window_id: int | None = None  # set once the shell has opened it; None = nothing to write
    phase: Phase = Phase.OPEN
    checksums: Mapping[BlockKey, int] = field(default_factory=dict)  # set when COMMITTING

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(offset, length) of the memory that may be written; empty objects need none."""
        return [(o.offset, o.length) for o in self.objects.values() if o.length and o.offset is not None]

    @property
    def waits_for_others(self) -> bool:
        """True if nothing was granted and the end of another writer could change the answer."""
        return not self.objects and any(s.outcome is Outcome.IN_PROGRESS for s in self.slots)

    def advance(self, before: Phase, after: Phase) -> None:
        if self.phase is not before:
            raise AssertionError(f"{self.reservation_id} is {self.phase}, not {before}")
        self.phase = after


@dataclass(slots=True, eq=False)
class Lease:
    """A reader's right to find objects unchanged in their place."""

    lease_id: str
    objects: tuple[StoredObject, ...]
    expires_at: float
    loads: tuple[Load, ...] = ()  # for the shell to start; without those already in flight


def check_ttl(ttl_s: float) -> None:
    """Raises InvalidRequest unless 0 < ttl_s <= MAX_TTL_S."""
    if not 0 < ttl_s <= MAX_TTL_S:
        raise InvalidRequest(f"ttl_s must be above 0 and at most {MAX_TTL_S:g}, not {ttl_s}", param="ttl_s")


def check_tenant(tenant: str) -> None:
    """Raises InvalidRequest for a name that the disk format cannot store, so that the put fails, not the demotion."""
    try:
        nbytes = len(tenant.encode())
    except (UnicodeEncodeError, AttributeError) as error:
        raise InvalidRequest(f"no name of a tenant: {tenant!r}", param="tenant") from error
    if nbytes > MAX_TENANT_BYTES:
        raise InvalidRequest(f"a tenant's name has at most {MAX_TENANT_BYTES} bytes, not {nbytes}", param="tenant")


Result = TypeVar("Result")

REMEMBER_ENDED_S = 60.0  # longer than the deadline of any call that might still arrive


class Deadlines:
    """Heap of the expiry times of rights. `expires_at` returns a right's current expiry, None if it has none.

    Outdated entries stay in the heap and are skipped when they reach its top.
    """

    def __init__(self, expires_at: Callable[[str], float | None]) -> None:
        self._expires_at = expires_at
        self._heap: list[tuple[float, str]] = []

    def note(self, right_id: str, at: float) -> None:
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


class Ended(Generic[Result]):
    """Remembers the ids of ended rights for REMEMBER_ENDED_S, with their results if they have one."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[float, Result | None]] = {}  # oldest first

    def remember(self, right_id: str, now: float, result: Result | None = None) -> None:
        """Notes that `right_id` ended at `now`. The first result of an id is kept."""
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest][0] > now:
                break
            del self._entries[oldest]
        self._entries.setdefault(right_id, (now + REMEMBER_ENDED_S, result))

    def __contains__(self, right_id: str) -> bool:
        return right_id in self._entries

    def result(self, right_id: str) -> Result | None:
        """Returns the result of an id; None if it has none or is unknown."""
        _, result = self._entries.get(right_id, (0.0, None))
        return result
