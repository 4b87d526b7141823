"""A store node without its shell: what it promised to writers and readers, over its catalog of objects. Pure.

Rights are `writing` and `reading`, here is what binds them to the rest: removal, pins, the disk, time. Times are
arguments, in monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvstore.allocator import padded
from kvstore.catalog import Catalog
from kvstore.disk.base import DiskObject, Pin, Place
from kvstore.moves import Moves
from kvstore.promises import Reservation
from kvstore.reading import ReadRights
from kvstore.stored import StoredObject, Wish
from kvstore.writing import WriteRights
from protocol.keys import BlockKey


class StoreState:
    """The rights of one node, over its `catalog` of objects: what is there is asked of that."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.counters = catalog.counters
        self.moves = Moves(catalog)
        self.writers = WriteRights(catalog, self.moves)
        self.readers = ReadRights(catalog, self.moves)

    def bytes_to_write(self, wishes: Iterable[Wish]) -> int:
        """Memory that these wishes need."""
        return sum(padded(w.length) for w in wishes if self.catalog.find(w.key) is None)

    def short_of(self, nbytes: int) -> bool:
        """Whether so much memory is not free now, but will be once what is being written to disk has left."""
        usage = self.catalog.usage()
        return usage.free_bytes < nbytes and self.moves.leaving_bytes > 0

    def remove(self, keys: Sequence[BlockKey], *, corrupt: bool, keep_pinned: bool = False) -> list[DiskObject]:
        """Takes objects out of sight at once, their space when their last hold ends; gives those that were there.

        `keep_pinned`: not those with a pin, nor what leads to them if it comes behind them. The shell has the disk
        forget what was removed, so that nothing of it comes back after a restart.
        """
        found = self._found(keys)
        if keep_pinned:
            found = _without_pinned(found)
        for stored in found:
            self.catalog.remove(stored)
        self.counters["integrity_failures" if corrupt else "objects_removed"] += len(found)
        return [stored.header() for stored in found]

    def remove_before(self, bounds: Mapping[BlockKey, int]) -> list[DiskObject]:
        """As `remove`, of each key only an object whose generation is below its bound, or that is a copy of another
        node's, since that was stored earlier than its generation says."""
        is_copy = self.catalog.rows.is_second_hand
        found = self._found(list(bounds))
        found = [o for o in found if o.generation < bounds[o.key] or is_copy(o.record)]
        for stored in found:
            self.catalog.remove(stored)
        return [stored.header() for stored in found]

    def reserved_before(self, at: float) -> int:
        """A bound: objects that were reserved here before `at` have a generation below it."""
        return self.catalog.reserving.before(at, self.catalog.latest_generation + 1)

    def pins(self, keys: Sequence[BlockKey]) -> list[Pin]:
        """Of each; none also where it is absent."""
        found = (self.catalog.find(key) for key in keys)
        return [Pin.NONE if stored is None else stored.pin for stored in found]

    def touch(self, packed_keys: bytes) -> None:
        """Counts as a use: these objects, in the order of their chain, were read without a lease. 16-byte keys, back to
        back. Raises ValueError."""
        records = self.catalog.records_among(packed_keys)
        self.counters["lease_hits"] += len(records)
        self.moves.touched(records)

    def pin(self, keys: Sequence[BlockKey], pin: Pin) -> int:
        """How much these objects may be evicted from now on; gives how many were there."""
        found = [stored for key in keys if (stored := self.catalog.find(key)) is not None]
        for stored in found:
            self.catalog.set_pin(stored, pin)
        return len(found)

    def _found(self, keys: Sequence[BlockKey]) -> list[StoredObject]:
        """Each once."""
        wanted = dict.fromkeys(keys)
        return [stored for key in wanted if (stored := self.catalog.find(key)) is not None]

    # The disk

    def restore(self, found: DiskObject, place: Place) -> bool:
        """An object was found on disk; False = it is not wanted."""
        stored = StoredObject(found.key, found.parent, found.length, found.generation)
        stored.tenant, stored.pin, stored.checksum = found.tenant, found.pin, found.checksum
        stored.place = place
        kept = self.catalog.restore(stored)
        self.counters["objects_restored"] += kept
        return kept

    def forget_disk(self) -> None:
        """The disk is gone, and with it all that was only there."""
        before = len(self.catalog)
        self.catalog.forget_disk()
        self.counters["objects_lost_with_disk"] += before - len(self.catalog)

    # Looking around

    def standing(self, stored: StoredObject) -> tuple[int, int]:
        """How many hold a visible object, and how many resident blocks follow it."""
        rows = self.catalog.rows
        return rows.holds[stored.record], rows.followers[stored.record]

    @property
    def num_not_on_disk(self) -> int:
        """Of them, those that would be lost with the memory."""
        return len(self.catalog) - self.catalog.books.num_places

    # Time

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        deadlines = (self.writers.next_deadline(), self.readers.next_deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def expire(self, now: float) -> list[Reservation]:
        """Ends what is over at `now`. The shell closes the windows of what is returned and says `closed` for each."""
        self.readers.expire(now)
        return self.writers.expire(now)

    def validate(self) -> None:
        """Raises AssertionError unless the catalog agrees with the rights granted on it."""
        self.moves.validate()
        self.writers.validate()
        self.readers.validate()
        self.catalog.validate(
            held=[*self.readers.held(), *self.moves.under_way()],
            reserved=self.writers.reserved(),
            loading=self.moves.extents(),
        )


def _without_pinned(found: Sequence[StoredObject]) -> list[StoredObject]:
    """Children come before parents."""
    kept: set[BlockKey | None] = set()
    going = []
    for stored in found:
        if stored.pin is not Pin.NONE or stored.key in kept:
            kept.add(stored.parent)
        else:
            going.append(stored)
    return going
