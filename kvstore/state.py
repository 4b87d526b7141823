"""What a store node promised to whom: reservations of writers, read leases, and when they end. Pure.

An object becomes visible after its bytes were verified behind the closed window, so nobody can change them afterwards.
A lease on objects that are only on disk brings them to memory first: it holds them at once and is *settled* when the
reads have ended.

Every right is granted idempotently by its id, and an id that has ended is remembered for a while: a call that was
overtaken by its own cancellation is refused instead of granted to nobody. Times are arguments, in monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from kvstore.allocator import padded
from kvstore.catalog import Catalog
from kvstore.disk.base import DiskObject, Pin, Place
from kvstore.moves import Load, Moves
from kvstore.native.base import Entry
from kvstore.promises import (
    MAX_TTL_S,
    Landed,
    Lease,
    Outcome,
    Phase,
    Reservation,
    Slot,
    Step,
    Wish,
)
from kvstore.rights import Deadlines, Ended
from kvstore.stored import DiskSpace, StoredObject, Usage
from protocol.errors import InvalidRequest, StaleLease
from protocol.keys import BlockKey


class StoreState:
    """The rights of one node, over its catalog of objects."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self.moves = Moves(catalog)
        self.counters = self._catalog.counters
        self._reservations: dict[str, Reservation] = {}
        self._ended_reservations: Ended[tuple[BlockKey, ...]] = Ended()  # the corrupt keys
        self._reservation_deadlines = Deadlines(self._reservation_expiry)
        self._leases: dict[str, Lease] = {}
        self._ended_leases: Ended[None] = Ended()
        self._lease_deadlines = Deadlines(self._lease_expiry)

    # Writers

    def reserve(
        self, reservation_id: str, wishes: Sequence[Wish], ttl_s: float | None, now: float
    ) -> Reservation:
        """Space for the wishes that nobody fulfils yet. The shell opens its window; asking again gives the same.

        `ttl_s` None: the writer is this process, which ends it in any case.

        Raises InvalidRequest (a length that can never fit), StaleLease (the id has ended).
        """
        known = self._reservations.get(reservation_id)
        if known is not None and known.phase is Phase.OPEN and known.wishes == tuple(wishes):
            return known
        if known is not None or reservation_id in self._ended_reservations:
            raise StaleLease("this reservation has ended", reservation_id=reservation_id)
        if ttl_s is not None:
            _check_ttl(ttl_s)
        for wish in wishes:
            self._check(wish)
        expires_at = math.inf if ttl_s is None else now + ttl_s
        reservation = self._grant(reservation_id, wishes, expires_at)
        if reservation.objects:
            self._reservations[reservation_id] = reservation
            if ttl_s is not None:
                self._reservation_deadlines.note(reservation_id, expires_at)
        if self._catalog.disk is None:
            self._catalog.room.trim()
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
            if (stored := reservation.objects[key]).offset is not None
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
            return self._again(known)
        if known is not None or lease_id in self._ended_leases:
            raise StaleLease("this lease has ended", lease_id=lease_id)
        _check_ttl(ttl_s)
        lease = Lease(lease_id, self._leading_run(keys), now + ttl_s)
        for stored in lease.objects:
            self._catalog.hold(stored)
        self._begin_loads(lease)
        self.counters["lease_hits"] += len(lease.objects)
        self.counters["lease_misses"] += len(keys) - len(lease.objects)
        self._used(lease.objects)
        if lease.objects:
            self._leases[lease_id] = lease
            self._lease_deadlines.note(lease_id, lease.expires_at)
        return lease

    def _again(self, lease: Lease) -> Lease:
        """The same answer to a call that came twice; its reads have begun."""
        lease.loads = ()
        if any(self.moves.is_loading(stored) for stored in lease.objects):
            return lease
        return self.settle(lease.lease_id)

    def _begin_loads(self, lease: Lease) -> None:
        """Cuts the lease at the first object for which there is no memory."""
        loads: list[Load] = []
        for count, stored in enumerate(lease.objects):
            if stored.offset is not None:
                continue
            begun = self.moves.is_loading(stored)
            load = self.moves.load(stored)
            if load is None:
                self._cut(lease, count)
                break
            if not begun:
                loads.append(load)
        lease.loads = tuple(loads)

    def settle(self, lease_id: str) -> Lease:
        """The reads that this lease waited for have ended: it keeps the leading run of what is in memory now.

        Raises StaleLease when it has ended meanwhile.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise StaleLease("this lease has ended", lease_id=lease_id)
        current: list[StoredObject] = []
        for stored in lease.objects:
            fresh = stored if stored.offset is not None else self._catalog.find(stored.key)
            if fresh is None or fresh.offset is None or fresh.generation != stored.generation:
                break
            current.append(fresh)
        self._cut(lease, len(current))
        lease.objects = tuple(current)
        if not current:
            del self._leases[lease_id]
        return lease

    def _cut(self, lease: Lease, count: int) -> None:
        for stored in lease.objects[count:]:
            self._catalog.let_go(stored)
        lease.objects = lease.objects[:count]

    def prefetch(self, keys: Sequence[BlockKey]) -> list[Load]:
        """Begins to bring the leading run of these keys to memory, as far as there is room."""
        loads: list[Load] = []
        for stored in self._leading_run(keys):
            if stored.offset is None and not self.moves.is_loading(stored):
                load = self.moves.load(stored)
                if load is None:
                    break
                loads.append(load)
        return loads

    def bytes_to_load(self, keys: Sequence[BlockKey]) -> int:
        """Memory that the leading run of these keys needs beyond what it has."""
        return sum(o.space for o in self._leading_run(keys) if o.offset is None)

    def bytes_to_write(self, wishes: Iterable[Wish]) -> int:
        """Memory that these wishes need."""
        return sum(padded(w.length) for w in wishes if self._catalog.find(w.key) is None)

    def short_of(self, nbytes: int) -> bool:
        """Whether so much memory is not free now, but will be once what is being written to disk has left."""
        usage = self._catalog.usage()
        return usage.free < nbytes and self.moves.leaving_bytes > 0

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
        return self._catalog.present(keys)

    def remove(self, keys: Sequence[BlockKey], *, corrupt: bool) -> list[DiskObject]:
        """Takes objects out of sight at once, their space when their last hold ends; gives those that were there.

        The shell has the disk forget them, so that they do not come back after a restart.
        """
        wanted = dict.fromkeys(keys)
        found = [stored for key in wanted if (stored := self._catalog.find(key)) is not None]
        for stored in found:
            self._catalog.remove(stored)
        self.counters["integrity_failures" if corrupt else "objects_removed"] += len(found)
        return [stored.header() for stored in found]

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Counts as a use: these objects, in the order of their chain, were read without a lease."""
        found = [stored for key in keys if (stored := self._catalog.find(key)) is not None]
        self.counters["lease_hits"] += len(found)
        self._used(found)

    def pin(self, keys: Sequence[BlockKey], pin: Pin) -> int:
        """How much these objects may be evicted from now on; gives how many were there."""
        found = [stored for key in keys if (stored := self._catalog.find(key)) is not None]
        for stored in found:
            self._catalog.set_pin(stored, pin)
        return len(found)

    # The disk

    def loaded(self, load: Load, good: bool) -> None:
        """A read from disk has ended. What could not be read is lost here."""
        self.counters["disk_reads_failed"] += not good
        self.moves.loaded(load, good)

    def use_disk(self, disk: DiskSpace) -> None:
        """There is a disk behind the memory from now on."""
        self._catalog.use_disk(disk)

    def restore(self, found: DiskObject, place: Place) -> bool:
        """An object was found on disk; False = it is not wanted."""
        stored = StoredObject(found.key, found.parent, found.length, found.generation)
        stored.tenant, stored.pin, stored.checksum = found.tenant, found.pin, found.checksum
        stored.place = place
        kept = self._catalog.restore(stored)
        self.counters["objects_restored"] += kept
        return kept

    def forget_disk(self) -> None:
        """The disk is gone, and with it all that was only there."""
        before = len(self._catalog)
        self._catalog.forget_disk()
        self.counters["objects_lost_with_disk"] += before - len(self._catalog)

    # Looking around

    def entry(self, key: BlockKey) -> Entry | None:
        """What readers must know of a visible object."""
        return self._catalog.entry(key)

    def find(self, key: BlockKey) -> StoredObject | None:
        return self._catalog.find(key)

    def objects(self) -> Iterator[StoredObject]:
        """All visible ones; see `Catalog.objects`."""
        return self._catalog.objects()

    def standing(self, stored: StoredObject) -> tuple[int, int]:
        """How many hold a visible object, and how many resident blocks follow it."""
        rows = self._catalog.rows
        return rows.holds[stored.record], rows.followers[stored.record]

    @property
    def latest_generation(self) -> int:
        """No object has a later one yet."""
        return self._catalog.latest_generation

    @property
    def num_objects(self) -> int:
        return len(self._catalog)

    @property
    def metadata_bytes(self) -> int:
        return self._catalog.metadata_bytes

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
        leases = self._leases.values()
        self.moves.validate()
        held = [stored for lease in leases for stored in lease.objects]
        self._catalog.validate(
            held=[*held, *self.moves.under_way()],
            reserved=[o for r in self._reservations.values() for o in r.objects.values()],
            loading=self.moves.extents(),
        )
        assert all(lease.lease_id in self._lease_deadlines for lease in leases)
        for reservation in self._reservations.values():
            timed = reservation.reservation_id in self._reservation_deadlines
            endless = reservation.expires_at == math.inf
            assert timed or endless or reservation.phase is not Phase.OPEN

    def _check(self, wish: Wish) -> None:
        self._catalog.check_size(wish.length)
        if wish.parent == wish.key:  # it could never be evicted
            raise InvalidRequest("an object cannot be its own parent", param="parent")

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
            self._used([visible])
            return Slot(outcome=Outcome.PRESENT)
        if self._catalog.is_reserved(wish.key):
            return Slot(outcome=Outcome.IN_PROGRESS)
        # A block whose parent found no space could never be reached: it would only take another's.
        headless = wish.parent in refused
        stored = None
        if not headless:
            stored = self._catalog.reserve(
                wish.key, wish.parent, wish.length, tenant=wish.tenant, pin=wish.pin
            )
        if stored is None:
            refused.add(wish.key)
            self.counters["wishes_refused"] += 1
            return Slot(outcome=Outcome.FULL)
        objects[wish.key] = stored
        assert stored.offset is not None
        return Slot(outcome=Outcome.GRANTED, offset=stored.offset)

    def _leading_run(self, keys: Sequence[BlockKey]) -> tuple[StoredObject, ...]:
        run: list[StoredObject] = []
        for key in keys:
            stored = self._catalog.find(key)
            if stored is None:
                break
            run.append(stored)
        return tuple(run)

    def _used(self, chain: Sequence[StoredObject]) -> None:
        """Its head counts as used last, so that it outlives its tail."""
        self._catalog.used(reversed(chain))
        self.moves.used(chain)

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
