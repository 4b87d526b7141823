"""Reservations of writers: space that is theirs until they commit, abort or time out. Pure.

An object becomes visible after its bytes were verified behind the closed window, so that nobody can change them
afterwards. Reservations are idempotent by id. An ended id is remembered for a while, so that a call that arrives after
its own cancellation is refused.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from moonserve.kvstore.state.catalog import Catalog
from moonserve.kvstore.state.objects import (
    EndedIds,
    ExpiryHeap,
    PutOutcome,
    PutRequest,
    Reservation,
    ReservationPhase,
    Slot,
    StoredObject,
    check_tenant,
    check_ttl,
)
from moonserve.kvstore.state.tiering import TierMoves
from moonserve.protocol.errors import InvalidRequest, StaleLease
from moonserve.protocol.kv_blocks import BlockKey


class Reservations:
    """The reservations of one node."""

    def __init__(self, catalog: Catalog, moves: TierMoves) -> None:
        self._catalog = catalog
        self._moves = moves
        self._counters = catalog.counters
        self._live: dict[str, Reservation] = {}
        self._ended: EndedIds[tuple[BlockKey, ...]] = EndedIds()  # results are the corrupt keys
        self._deadlines = ExpiryHeap(self._expiry)

    def reserve(
        self, reservation_id: str, requests: Sequence[PutRequest], ttl_s: float | None, now: float
    ) -> Reservation:
        """Reserves space for the requests that are neither visible nor being written. A repeated call returns the same.

        The shell opens the write window. `ttl_s` None = no expiry: the writer is this process, which always ends it.

        Raises InvalidRequest (a length that can never fit, a bad TTL or tenant), StaleLease (the id has ended).
        """
        known = self._live.get(reservation_id)
        if known is not None and known.phase is ReservationPhase.OPEN and known.requests == tuple(requests):
            return known
        if known is not None or reservation_id in self._ended:
            raise StaleLease("this reservation has ended", reservation_id=reservation_id)
        if ttl_s is not None:
            check_ttl(ttl_s)
        for tenant in {request.tenant for request in requests}:
            check_tenant(tenant)
        for request in requests:
            self._catalog.accounting.check_size(request.length)
            if request.parent == request.key:  # it could never be evicted
                raise InvalidRequest("an object cannot be its own parent", param="parent")
        expires_at = math.inf if ttl_s is None else now + ttl_s
        self._catalog.evictor.advance(now)
        self._catalog.generation_clock.record(now, self._catalog.latest_generation + 1)
        reservation = self._grant(reservation_id, requests, expires_at)
        if reservation.objects:
            self._live[reservation_id] = reservation
            if ttl_s is not None:
                self._deadlines.add(reservation_id, expires_at)
        if self._catalog.disk is None:
            self._catalog.evictor.evict_to_low_watermark()
        return reservation

    def commit(self, reservation_id: str, checksums: Mapping[BlockKey, int], now: float) -> tuple[BlockKey, ...] | None:
        """Starts a commit of the keys in `checksums`; the reservation's other keys are dropped.

        Returns None if the shell is now to close the window, verify `objects_to_verify` and call `verified`; the
        corrupt keys if the commit has already happened. Raises StaleLease if the reservation has ended or expired, or
        does not have one of the keys.
        """
        result = self._ended.result(reservation_id)
        if result is not None:
            return result
        reservation = self._live.get(reservation_id)
        if reservation is None or reservation.phase is not ReservationPhase.OPEN:
            raise StaleLease("this reservation has ended", reservation_id=reservation_id)
        if reservation.expires_at <= now:
            raise StaleLease("this reservation has expired", reservation_id=reservation_id)
        strangers = checksums.keys() - reservation.objects.keys()
        if strangers:
            raise StaleLease(
                f"{len(strangers)} keys are not part of this reservation",
                reservation_id=reservation_id,
            )
        reservation.advance(ReservationPhase.OPEN, ReservationPhase.COMMITTING)
        reservation.checksums = dict(checksums)
        for key, checksum in checksums.items():
            reservation.objects[key].checksum = checksum
        return None

    def objects_to_verify(self, reservation_id: str) -> tuple[int | None, list[StoredObject]]:
        """Returns the window that a running commit has to close, and the objects to verify then."""
        reservation = self._live[reservation_id]
        return reservation.window_id, [reservation.objects[key] for key in reservation.checksums]

    def verified(self, reservation_id: str, corrupt: Collection[BlockKey], now: float) -> None:
        """Ends a commit whose window is closed and whose bytes were verified. All but the corrupt objects become
        visible."""
        reservation = self._live[reservation_id]
        reservation.advance(ReservationPhase.COMMITTING, ReservationPhase.ENDED)
        self._catalog.evictor.advance(now)
        self._catalog.generation_clock.record(now, self._catalog.latest_generation + 1)
        for key, stored in reservation.objects.items():
            if key in reservation.checksums and key not in corrupt:
                self._catalog.publish(stored, reservation.checksums[key])
                self._counters["objects_stored"] += 1
            else:
                self._catalog.discard(stored)
        self._counters["integrity_failures"] += len(corrupt)
        del self._live[reservation_id]
        self._ended.add(reservation_id, now, tuple(corrupt))

    def abort(self, reservation_id: str, now: float) -> Reservation | None:
        """Aborts an open reservation. The shell closes the window of the returned one and calls `window_closed`."""
        reservation = self._live.get(reservation_id)
        if reservation is None:
            self._ended.add(reservation_id, now)
            return None
        if reservation.phase is not ReservationPhase.OPEN:
            return None
        reservation.advance(ReservationPhase.OPEN, ReservationPhase.CLOSING)
        return reservation

    def window_closed(self, reservation_id: str, now: float) -> None:
        """Frees the space of an aborted or expired reservation whose window is closed."""
        reservation = self._live[reservation_id]
        reservation.advance(ReservationPhase.CLOSING, ReservationPhase.ENDED)
        for stored in reservation.objects.values():
            self._catalog.discard(stored)
        del self._live[reservation_id]
        self._ended.add(reservation_id, now)

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def expire(self, now: float) -> list[Reservation]:
        """Ends reservations that have expired at `now`. The shell closes their windows and calls `window_closed`."""
        given_up: list[Reservation] = []
        for reservation_id in self._deadlines.due(now):
            reservation = self._live[reservation_id]
            reservation.advance(ReservationPhase.OPEN, ReservationPhase.CLOSING)
            given_up.append(reservation)
            self._counters["reservations_expired"] += 1
        return given_up

    def reserved_objects(self) -> list[StoredObject]:
        """Returns the objects that are being written."""
        return [stored for held in self._live.values() for stored in held.objects.values()]

    def validate(self) -> None:
        """Raises AssertionError unless every open reservation has a deadline or never expires."""
        for reservation in self._live.values():
            timed = reservation.reservation_id in self._deadlines
            endless = reservation.expires_at == math.inf
            assert timed or endless or reservation.phase is not ReservationPhase.OPEN

    def _grant(self, reservation_id: str, requests: Sequence[PutRequest], expires_at: float) -> Reservation:
        objects: dict[BlockKey, StoredObject] = {}
        refused: set[BlockKey] = set()
        slots = tuple(self._reserve_one(request, objects, refused) for request in requests)
        return Reservation(reservation_id, tuple(requests), slots, objects, expires_at)

    def _reserve_one(self, request: PutRequest, objects: dict[BlockKey, StoredObject], refused: set[BlockKey]) -> Slot:
        """Decides one request. Adds a granted object to `objects`, and a key without space to `refused`."""
        visible = self._catalog.find(request.key)
        if visible is not None:
            self._moves.record_uses([visible])
            self._catalog.evictor.hint(visible.record, request.hints, visible.space, is_new=False)
            return Slot(outcome=PutOutcome.PRESENT)
        if self._catalog.is_reserved(request.key):
            return Slot(outcome=PutOutcome.IN_PROGRESS)
        # A block whose parent was refused could never be reached, and would only take space from others.
        stored = None if request.parent in refused else self._catalog.reserve(request)
        if stored is None:
            refused.add(request.key)
            self._counters["wishes_refused"] += 1
            return Slot(outcome=PutOutcome.FULL)
        objects[request.key] = stored
        assert stored.offset is not None
        return Slot(outcome=PutOutcome.GRANTED, offset=stored.offset)

    def _expiry(self, reservation_id: str) -> float | None:
        reservation = self._live.get(reservation_id)
        if reservation is None or reservation.phase is not ReservationPhase.OPEN:
            return None
        return reservation.expires_at
