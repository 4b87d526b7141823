"""Leases of readers: an object under a lease stays where it is. Pure.

A lease on objects that are only on disk loads them into memory first: it holds them at once and is *settled* when the
reads have ended. Leases are idempotent by id, like the reservations of writers.
"""

from collections.abc import Sequence

from moonserve.kvstore.state.catalog import Catalog
from moonserve.kvstore.state.objects import DiskReadMove, EndedIds, ExpiryHeap, Lease, StoredObject, check_ttl
from moonserve.kvstore.state.tiering import TierMoves
from moonserve.protocol.errors import StaleLease
from moonserve.protocol.kv_blocks import BlockKey


class Leases:
    """The leases of one node."""

    def __init__(self, catalog: Catalog, moves: TierMoves) -> None:
        self._catalog = catalog
        self._moves = moves
        self._counters = catalog.counters
        self._live: dict[str, Lease] = {}
        self._ended: EndedIds[None] = EndedIds()
        self._deadlines = ExpiryHeap(self._expiry)

    def grant(self, lease_id: str, keys: Sequence[BlockKey], ttl_s: float, now: float) -> Lease:
        """Leases the longest run of leading keys that are visible. An empty lease need not be released.

        A repeated call returns the same lease. Raises StaleLease if the id has ended, InvalidRequest for a bad TTL.
        """
        known = self._live.get(lease_id)
        if known is not None and known.expires_at > now:
            return self._repeat(known)
        if known is not None or lease_id in self._ended:
            raise StaleLease("this lease has ended", lease_id=lease_id)
        check_ttl(ttl_s)
        self._catalog.evictor.advance(now)
        lease = Lease(lease_id, self._leading_run(keys), now + ttl_s)
        for stored in lease.objects:
            self._catalog.hold(stored)
        self._begin_loads(lease)
        self._counters["lease_hits"] += len(lease.objects)
        self._counters["lease_misses"] += len(keys) - len(lease.objects)
        self._moves.record_uses(lease.objects)
        if lease.objects:
            self._live[lease_id] = lease
            self._deadlines.add(lease_id, lease.expires_at)
        return lease

    def _repeat(self, lease: Lease) -> Lease:
        """Returns a live lease to a repeated call, without loads, since its reads have begun."""
        lease.loads = ()
        if any(self._moves.is_loading(stored) for stored in lease.objects):
            return lease
        return self.settle(lease.lease_id)

    def _begin_loads(self, lease: Lease) -> None:
        """Starts to load the objects that are only on disk. Cuts the lease at the first one without memory for it."""
        loads: list[DiskReadMove] = []
        for count, stored in enumerate(lease.objects):
            if stored.offset is not None:
                continue
            begun = self._moves.is_loading(stored)
            load = self._moves.start_read(stored)
            if load is None:
                self._cut(lease, count)
                break
            if not begun:
                loads.append(load)
        lease.loads = tuple(loads)

    def settle(self, lease_id: str) -> Lease:
        """Cuts a lease whose reads have ended to the leading run of objects that are in memory now.

        Raises StaleLease if it has ended meanwhile.
        """
        lease = self._live.get(lease_id)
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
            del self._live[lease_id]
        return lease

    def _cut(self, lease: Lease, count: int) -> None:
        for stored in lease.objects[count:]:
            self._catalog.drop_hold(stored)
        lease.objects = lease.objects[:count]

    def prefetch(self, keys: Sequence[BlockKey]) -> list[DiskReadMove]:
        """Starts to load the leading run of these keys into memory, as far as there is room."""
        loads: list[DiskReadMove] = []
        for stored in self._leading_run(keys):
            if stored.offset is None and not self._moves.is_loading(stored):
                load = self._moves.start_read(stored)
                if load is None:
                    break
                loads.append(load)
        return loads

    def bytes_to_read(self, keys: Sequence[BlockKey]) -> int:
        """Returns the bytes of memory needed to load the leading run of these keys."""
        return sum(o.space for o in self._leading_run(keys) if o.offset is None)

    def renew(self, lease_id: str, ttl_s: float, now: float) -> None:
        """Extends a lease to `ttl_s` from now. Raises StaleLease if it has ended, InvalidRequest for a bad TTL."""
        check_ttl(ttl_s)
        lease = self._live.get(lease_id)
        if lease is None or lease.expires_at <= now:
            raise StaleLease("this lease has ended", lease_id=lease_id)
        lease.expires_at = now + ttl_s
        self._deadlines.add(lease_id, lease.expires_at)

    def release(self, lease_id: str, now: float) -> None:
        """Ends a lease; no-op if it has ended."""
        lease = self._live.pop(lease_id, None)
        if lease is not None:
            for stored in lease.objects:
                self._catalog.drop_hold(stored)
        self._ended.add(lease_id, now)

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def expire(self, now: float) -> None:
        """Ends the leases that have expired at `now`."""
        for lease_id in self._deadlines.due(now):
            self.release(lease_id, now)
            self._counters["leases_expired"] += 1

    def leased_objects(self) -> list[StoredObject]:
        """Returns the leased objects, one entry per lease."""
        return [stored for lease in self._live.values() for stored in lease.objects]

    def validate(self) -> None:
        """Raises AssertionError unless every live lease has a deadline."""
        assert all(lease_id in self._deadlines for lease_id in self._live)

    def _leading_run(self, keys: Sequence[BlockKey]) -> tuple[StoredObject, ...]:
        run: list[StoredObject] = []
        for key in keys:
            stored = self._catalog.find(key)
            if stored is None:
                break
            run.append(stored)
        return tuple(run)

    def _expiry(self, lease_id: str) -> float | None:
        lease = self._live.get(lease_id)
        return None if lease is None else lease.expires_at
