"""What a store node promised to whom: reservations of writers, read leases, and when they end. Pure.

A reservation's life is the table `_NEXT`. **Its space is never free while its write window is open**: committing and
giving up both close the window first, which the shell does and reports. An object becomes visible after its bytes
were verified behind the closed window, so nobody can change them afterwards.

Every right is granted idempotently by its id, and an id that has ended is remembered for a while: a call that was
overtaken by its own cancellation is refused instead of granted to nobody. Times are arguments, in monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.catalog import Announcements, Catalog, StoredObject, Usage, Watermarks
from kvstore.eviction import EvictionPolicy
from kvstore.rights import Deadlines, Ended
from protocol.errors import InvalidRequest, StaleLease
from protocol.keys import BlockKey

MAX_TTL_S = 600.0


class Outcome(StrEnum):
    """What became of one wish of a writer."""

    GRANTED = "granted"
    PRESENT = "present"
    IN_PROGRESS = "in_progress"  # another writer holds it
    FULL = "full"  # nothing could be evicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """An object that a writer wants to store."""

    key: BlockKey
    parent: BlockKey | None
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The answer to one wish."""

    outcome: Outcome
    offset: int = 0  # GRANTED


class Phase(StrEnum):
    """Where a live reservation is; ended ones are only remembered by id."""

    OPEN = "open"  # its window is open
    COMMITTING = "committing"  # window being closed, then bytes verified
    CLOSING = "closing"  # window being closed, then space freed
    ENDED = "ended"


class Step(StrEnum):
    """What moves a reservation on."""

    COMMIT = "commit"
    GIVE_UP = "give_up"  # aborted or expired
    VERIFIED = "verified"
    CLOSED = "closed"


_NEXT = {
    (Phase.OPEN, Step.COMMIT): Phase.COMMITTING,
    (Phase.OPEN, Step.GIVE_UP): Phase.CLOSING,
    (Phase.COMMITTING, Step.VERIFIED): Phase.ENDED,
    (Phase.CLOSING, Step.CLOSED): Phase.ENDED,
}


@dataclass(slots=True, eq=False)
class Reservation:
    """A writer's right to space."""

    reservation_id: str
    wishes: tuple[Wish, ...]
    slots: tuple[Slot, ...]  # one per wish
    objects: dict[BlockKey, StoredObject]  # the granted ones
    expires_at: float
    window_id: int | None = None  # set once the shell has opened it; None = nothing to write
    phase: Phase = Phase.OPEN
    checksums: Mapping[BlockKey, int] = field(default_factory=dict)  # COMMITTING

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(offset, length) of what may be written; empty objects are complete as they are."""
        return [(o.offset, o.length) for o in self.objects.values() if o.length]

    @property
    def waits_for_others(self) -> bool:
        """Whether nothing was granted and other writers' ends would change the answer."""
        return not self.objects and any(s.outcome is Outcome.IN_PROGRESS for s in self.slots)

    def advance(self, step: Step) -> None:
        following = _NEXT.get((self.phase, step))
        if following is None:
            raise AssertionError(f"{self.reservation_id}: {step} while {self.phase}")
        self.phase = following


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """Written bytes to verify."""

    key: BlockKey
    offset: int
    length: int
    checksum: int


@dataclass(slots=True, eq=False)
class Lease:
    """A reader's right to find the bytes unchanged."""

    lease_id: str
    objects: tuple[StoredObject, ...]
    expires_at: float


class StoreState:
    """The rights of one node, over its catalog of objects."""

    def __init__(
        self,
        capacity: int,
        *,
        policy: EvictionPolicy,
        announce: Announcements,
        watermarks: Watermarks,
    ) -> None:
        self._catalog = Catalog(capacity, policy=policy, announce=announce, watermarks=watermarks)
        self.counters = self._catalog.counters
        self._reservations: dict[str, Reservation] = {}
        self._ended_reservations: Ended[tuple[BlockKey, ...]] = Ended()  # the corrupt keys
        self._reservation_deadlines = Deadlines(self._reservation_expiry)
        self._leases: dict[str, Lease] = {}
        self._ended_leases: Ended[None] = Ended()
        self._lease_deadlines = Deadlines(self._lease_expiry)

    # Writers

    def reserve(
        self, reservation_id: str, wishes: Sequence[Wish], ttl_s: float, now: float
    ) -> Reservation:
        """Space for the wishes that nobody fulfils yet. The shell opens its window; asking again gives the same.

        Raises InvalidRequest (a length that can never fit), StaleLease (the id has ended).
        """
        known = self._reservations.get(reservation_id)
        if known is not None and known.phase is Phase.OPEN and known.wishes == tuple(wishes):
            return known
        if known is not None or reservation_id in self._ended_reservations:
            raise StaleLease("this reservation has ended", reservation_id=reservation_id)
        _check_ttl(ttl_s)
        for wish in wishes:
            self._catalog.check_size(wish.length)
        reservation = self._grant(reservation_id, wishes, now + ttl_s)
        if reservation.objects:
            self._reservations[reservation_id] = reservation
            self._reservation_deadlines.note(reservation_id, reservation.expires_at)
        self._catalog.trim()
        return reservation

    def commit(
        self, reservation_id: str, checksums: Mapping[BlockKey, int], now: float
    ) -> tuple[BlockKey, ...] | None:
        """Starts a commit of the keys in `checksums`; the reservation's other keys are dropped.

        None = the shell now closes the window, verifies `landed` and says `verified`. Otherwise the corrupt keys of
        the commit that has already happened. Raises StaleLease.
        """
        result = self._ended_reservations.result(reservation_id)
        if result is not None:
            return result
        reservation = self._reservations.get(reservation_id)
        if reservation is None or reservation.phase is not Phase.OPEN:
            raise StaleLease("this reservation has ended", reservation_id=reservation_id)
        if reservation.expires_at <= now:
            raise StaleLease("this reservation has expired", reservation_id=reservation_id)
        strangers = checksums.keys() - reservation.objects.keys()
        if strangers:
            raise StaleLease(
                f"{len(strangers)} keys are not part of this reservation",
                reservation_id=reservation_id,
            )
        reservation.advance(Step.COMMIT)
        reservation.checksums = dict(checksums)
        return None

    def landed(self, reservation_id: str) -> tuple[int | None, list[Landed]]:
        """The window that a commit under way has to close, and what it has to verify then."""
        reservation = self._reservations[reservation_id]
        return reservation.window_id, [
            Landed(key=key, offset=stored.offset, length=stored.length, checksum=checksum)
            for key, checksum in reservation.checksums.items()
            if (stored := reservation.objects[key])
        ]

    def verified(self, reservation_id: str, corrupt: Collection[BlockKey], now: float) -> None:
        """The window is closed and the bytes were compared: objects become visible, except the corrupt ones."""
        reservation = self._reservations[reservation_id]
        reservation.advance(Step.VERIFIED)
        for key, stored in reservation.objects.items():
            if key in reservation.checksums and key not in corrupt:
                self._catalog.publish(stored, reservation.checksums[key])
                self.counters["objects_stored"] += 1
            else:
                self._catalog.discard(stored)
        self.counters["integrity_failures"] += len(corrupt)
        del self._reservations[reservation_id]
        self._ended_reservations.remember(reservation_id, now, tuple(corrupt))

    def abort(self, reservation_id: str, now: float) -> Reservation | None:
        """The writer gives up. The shell closes the window of what is returned and says `closed`."""
        reservation = self._reservations.get(reservation_id)
        if reservation is None:
            self._ended_reservations.remember(reservation_id, now)
            return None
        if reservation.phase is not Phase.OPEN:
            return None
        reservation.advance(Step.GIVE_UP)
        return reservation

    def closed(self, reservation_id: str, now: float) -> None:
        """The window of a reservation that was given up is closed: its space is free."""
        reservation = self._reservations[reservation_id]
        reservation.advance(Step.CLOSED)
        for stored in reservation.objects.values():
            self._catalog.discard(stored)
        del self._reservations[reservation_id]
        self._ended_reservations.remember(reservation_id, now)

    # Readers

    def lease(self, lease_id: str, keys: Sequence[BlockKey], ttl_s: float, now: float) -> Lease:
        """A lease on the longest run of leading keys that are visible; with none of them there is nothing to release.

        Asking again gives the same. Raises StaleLease when the id has ended, InvalidRequest.
        """
        known = self._leases.get(lease_id)
        if known is not None and known.expires_at > now:
            return known
        if known is not None or lease_id in self._ended_leases:
            raise StaleLease("this lease has ended", lease_id=lease_id)
        _check_ttl(ttl_s)
        lease = Lease(lease_id, self._leading_run(keys), now + ttl_s)
        self.counters["lease_hits"] += len(lease.objects)
        self.counters["lease_misses"] += len(keys) - len(lease.objects)
        if not lease.objects:
            return lease
        for stored in lease.objects:
            self._catalog.hold(stored)
        self._catalog.used(reversed(lease.objects))
        self._leases[lease_id] = lease
        self._lease_deadlines.note(lease_id, lease.expires_at)
        return lease

    def renew(self, lease_id: str, ttl_s: float, now: float) -> None:
        """Lets a lease last `ttl_s` from now. Raises StaleLease when it has ended, InvalidRequest."""
        _check_ttl(ttl_s)
        lease = self._leases.get(lease_id)
        if lease is None or lease.expires_at <= now:
            raise StaleLease("this lease has ended", lease_id=lease_id)
        lease.expires_at = now + ttl_s
        self._lease_deadlines.note(lease_id, lease.expires_at)

    def release(self, lease_id: str, now: float) -> None:
        """Ends a lease; no-op when it has ended."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            for stored in lease.objects:
                self._catalog.let_go(stored)
        self._ended_leases.remember(lease_id, now)

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self._catalog.find(key) is not None for key in keys]

    def remove(self, keys: Sequence[BlockKey], *, corrupt: bool) -> int:
        """Takes objects out of sight at once, their space when their last lease ends; gives how many were there."""
        wanted = dict.fromkeys(keys)
        found = [stored for key in wanted if (stored := self._catalog.find(key)) is not None]
        for stored in found:
            self._catalog.remove(stored)
        self.counters["integrity_failures" if corrupt else "objects_removed"] += len(found)
        return len(found)

    # Time

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        deadlines = (self._reservation_deadlines.next(), self._lease_deadlines.next())
        return min((at for at in deadlines if at is not None), default=None)

    def expire(self, now: float) -> list[Reservation]:
        """Ends what is over at `now`. The shell closes the windows of what is returned and says `closed` for each."""
        for lease_id in self._lease_deadlines.due(now):
            self.release(lease_id, now)
            self.counters["leases_expired"] += 1
        given_up: list[Reservation] = []
        for reservation_id in self._reservation_deadlines.due(now):
            reservation = self._reservations[reservation_id]
            reservation.advance(Step.GIVE_UP)
            given_up.append(reservation)
            self.counters["reservations_expired"] += 1
        return given_up

    def usage(self) -> Usage:
        return self._catalog.usage()

    def validate(self) -> None:
        """Raises AssertionError unless the catalog agrees with the rights granted on it."""
        self._catalog.validate()
        leases = self._leases.values()
        self._catalog.validate_rights(
            leased=[stored for lease in leases for stored in lease.objects],
            reserved=[o for r in self._reservations.values() for o in r.objects.values()],
        )
        assert all(lease.lease_id in self._lease_deadlines for lease in leases)
        for reservation in self._reservations.values():
            timed = reservation.reservation_id in self._reservation_deadlines
            assert timed or reservation.phase is not Phase.OPEN

    def _grant(self, reservation_id: str, wishes: Sequence[Wish], expires_at: float) -> Reservation:
        objects: dict[BlockKey, StoredObject] = {}
        refused: set[BlockKey] = set()
        slots = tuple(self._fulfil(wish, objects, refused) for wish in wishes)
        return Reservation(reservation_id, tuple(wishes), slots, objects, expires_at)

    def _fulfil(
        self, wish: Wish, objects: dict[BlockKey, StoredObject], refused: set[BlockKey]
    ) -> Slot:
        """Decides one wish; adds to `objects` what it grants, to `refused` what has no space."""
        visible = self._catalog.find(wish.key)
        if visible is not None:
            self._catalog.used([visible])
            return Slot(outcome=Outcome.PRESENT)
        if self._catalog.is_reserved(wish.key):
            return Slot(outcome=Outcome.IN_PROGRESS)
        # A block whose parent found no space could never be reached: it would only take another's.
        headless = wish.parent in refused
        stored = None if headless else self._catalog.reserve(wish.key, wish.parent, wish.length)
        if stored is None:
            refused.add(wish.key)
            self.counters["wishes_refused"] += 1
            return Slot(outcome=Outcome.FULL)
        objects[wish.key] = stored
        return Slot(outcome=Outcome.GRANTED, offset=stored.offset)

    def _leading_run(self, keys: Sequence[BlockKey]) -> tuple[StoredObject, ...]:
        run: list[StoredObject] = []
        for key in keys:
            stored = self._catalog.find(key)
            if stored is None:
                break
            run.append(stored)
        return tuple(run)

    def _lease_expiry(self, lease_id: str) -> float | None:
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.expires_at

    def _reservation_expiry(self, reservation_id: str) -> float | None:
        reservation = self._reservations.get(reservation_id)
        if reservation is None or reservation.phase is not Phase.OPEN:
            return None
        return reservation.expires_at


def _check_ttl(ttl_s: float) -> None:
    if not 0 < ttl_s <= MAX_TTL_S:
        raise InvalidRequest(
            f"ttl_s must be above 0 and at most {MAX_TTL_S:g}, not {ttl_s}", param="ttl_s"
        )
