"""State of a store node: its catalog of objects, and the rights of writers and readers on them. Pure.

The rights are in `reservations` and `leases`; this module connects them with removal, pins, the disk and time. Times
are arguments, in monotonic seconds.
"""

from collections.abc import Iterable, Mapping, Sequence

from moonserve.kvstore.disk.base import DiskObject, Pin, Place
from moonserve.kvstore.state.allocator import padded
from moonserve.kvstore.state.catalog import Catalog
from moonserve.kvstore.state.leases import Leases
from moonserve.kvstore.state.objects import PutRequest, Reservation, StoredObject
from moonserve.kvstore.state.reservations import Reservations
from moonserve.kvstore.state.tiering import TierMoves
from moonserve.protocol.kv_blocks import BlockKey


class StoreState:
    """The rights of one node over its objects. Query `catalog` for the objects themselves."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.counters = catalog.counters
        self.tier_moves = TierMoves(catalog)
        self.reservations = Reservations(catalog, self.tier_moves)
        self.leases = Leases(catalog, self.tier_moves)

    def bytes_to_write(self, requests: Iterable[PutRequest]) -> int:
        """Returns the bytes of memory that these requests need."""
        return sum(padded(w.length) for w in requests if self.catalog.find(w.key) is None)

    def should_wait_for_memory(self, nbytes: int) -> bool:
        """Returns True if fewer than `nbytes` of memory are free while demotions in flight will free some."""
        usage = self.catalog.usage()
        return usage.free_bytes < nbytes and self.tier_moves.demoting_bytes > 0

    def remove(self, keys: Sequence[BlockKey], *, corrupt: bool, keep_pinned: bool = False) -> list[DiskObject]:
        """Removes visible objects; their space is freed when their last hold ends. Returns the removed objects.

        With `keep_pinned`, pinned objects stay, and so do their ancestors that come after them in `keys`. The shell
        makes the disk forget the removed objects, so that none of them returns after a restart.
        """
        found = self._found(keys)
        if keep_pinned:
            found = _without_pinned(found)
        for stored in found:
            self.catalog.remove(stored)
        self.counters["integrity_failures" if corrupt else "objects_removed"] += len(found)
        return [stored.header() for stored in found]

    def remove_before(self, bounds: Mapping[BlockKey, int]) -> list[DiskObject]:
        """Removes, for each key, an object whose generation is below the bound or that was copied from another node:
        a copy was stored earlier than its generation says. Returns the removed objects."""
        is_copy = self.catalog.rows.is_copied
        found = self._found(list(bounds))
        found = [o for o in found if o.generation < bounds[o.key] or is_copy(o.record)]
        for stored in found:
            self.catalog.remove(stored)
        return [stored.header() for stored in found]

    def reserved_before(self, at: float) -> int:
        """Returns a bound: objects that were reserved here before `at` have a generation below it."""
        return self.catalog.generation_clock.bound_before(at, self.catalog.latest_generation + 1)

    def pins(self, keys: Sequence[BlockKey]) -> list[Pin]:
        """Returns the pin of each key; `Pin.NONE` if it is absent."""
        found = (self.catalog.find(key) for key in keys)
        return [Pin.NONE if stored is None else stored.pin for stored in found]

    def record_uses(self, packed_keys: bytes) -> None:
        """Records that these objects, in the order of their chain, were read without a lease. Keys are packed, 16 bytes
        each. Raises ValueError if the last one is cut off."""
        records = self.catalog.records_among(packed_keys)
        self.counters["lease_hits"] += len(records)
        self.tier_moves.record_uses_by_record(records)

    def pin(self, keys: Sequence[BlockKey], pin: Pin) -> int:
        """Sets the pin of these objects. Returns how many were present."""
        found = [stored for key in keys if (stored := self.catalog.find(key)) is not None]
        for stored in found:
            self.catalog.set_pin(stored, pin)
        return len(found)

    def _found(self, keys: Sequence[BlockKey]) -> list[StoredObject]:
        """Returns the visible objects of these keys, each once."""
        wanted = dict.fromkeys(keys)
        return [stored for key in wanted if (stored := self.catalog.find(key)) is not None]

    # The disk

    def restore(self, found: DiskObject, place: Place) -> bool:
        """Takes in an object that was found on disk. Returns False if it is not wanted."""
        stored = StoredObject(found.key, found.parent, found.length, found.generation)
        stored.tenant, stored.pin, stored.checksum = found.tenant, found.pin, found.checksum
        stored.place = place
        kept = self.catalog.restore(stored)
        self.counters["objects_restored"] += kept
        return kept

    def forget_disk(self) -> None:
        """Removes the disk and every object that was only there, and counts the lost objects."""
        before = len(self.catalog)
        self.catalog.forget_disk()
        self.counters["objects_lost_with_disk"] += before - len(self.catalog)

    def holds_and_children(self, stored: StoredObject) -> tuple[int, int]:
        """Returns the number of holds on a visible object, and of blocks that name it as their parent."""
        rows = self.catalog.rows
        return rows.holds[stored.record], rows.num_children[stored.record]

    @property
    def num_not_on_disk(self) -> int:
        """Visible objects that would be lost with the memory."""
        return len(self.catalog) - self.catalog.accounting.num_disk_copies

    # Time

    def next_deadline(self) -> float | None:
        """Returns when `expire` has something to do next."""
        deadlines = (self.reservations.next_deadline(), self.leases.next_deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def expire(self, now: float) -> list[Reservation]:
        """Ends rights that have expired at `now`. The shell closes the windows of the returned reservations and calls
        `writers.window_closed` for each."""
        self.catalog.evictor.advance(now)
        self.leases.expire(now)
        return self.reservations.expire(now)

    def validate(self) -> None:
        """Raises AssertionError unless the catalog agrees with the granted rights."""
        self.tier_moves.validate()
        self.reservations.validate()
        self.leases.validate()
        self.catalog.validate(
            held=[*self.leases.leased_objects(), *self.tier_moves.in_flight()],
            reserved=self.reservations.reserved_objects(),
            loading=self.tier_moves.reading_extents(),
        )


def _without_pinned(found: Sequence[StoredObject]) -> list[StoredObject]:
    """Returns the objects that are neither pinned nor followed by a kept one. Children come before parents."""
    kept: set[BlockKey | None] = set()
    going = []
    for stored in found:
        if stored.pin is not Pin.NONE or stored.key in kept:
            kept.add(stored.parent)
        else:
            going.append(stored)
    return going
