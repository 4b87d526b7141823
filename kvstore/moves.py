"""What goes from memory to disk and back: which objects, and what counts once it has happened. Pure.

Demotion runs ahead of need: above the high watermark the coldest objects are written to disk, and leave memory once
they are there. Promotion happens when an object that is only on disk is wanted. A move holds its object, so
that nothing else happens to it but its removal, which makes the move's result worthless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.catalog import Catalog
from kvstore.disk.base import DiskObject, Place
from kvstore.native.base import RecordArray
from kvstore.stored import StoredObject


@dataclass(slots=True, eq=False)
class Store:
    """An object being written to disk. The shell writes it and says `stored`."""

    object: StoredObject
    demote: bool  # whether it leaves memory afterwards
    disk_bytes: int


@dataclass(slots=True, eq=False)
class Load:
    """An object being read from disk into `offset`. The shell reads it and says `loaded`."""

    object: StoredObject
    offset: int


class Moves:
    """The moves under way of one catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._stores: dict[int, Store] = {}  # by generation
        self._loads: dict[int, Load] = {}
        self._checks: list[StoredObject] = []
        self.leaving_bytes = 0
        """Memory that will be free once the writes under way that demote have ended."""
        self._draining = False  # above the high watermark, and not yet below the low one

    @property
    def num_stores(self) -> int:
        """Of writes under way, those of empty objects too."""
        return len(self._stores)

    def demotions(self, limit_bytes: int) -> list[Store]:
        """The next writes, at most `limit_bytes` and one object; empty when memory is below its watermarks.

        What has a copy on disk already leaves at once.
        """
        begun: list[Store] = []
        while limit_bytes > 0 and self._too_full():
            stored = self._catalog.room.coldest_in_memory()
            if stored is None:
                break
            if stored.place is not None:
                self._catalog.leave_memory(stored)
            elif self._begin_store(stored, demote=True):
                begun.append(self._stores[stored.generation])
                limit_bytes -= stored.space
            else:
                break
        return begun

    def copies(self, limit_bytes: int, objects: Sequence[StoredObject]) -> list[Store]:
        """Writes of those `objects` that are in memory only and not being written; they stay in memory."""
        begun: list[Store] = []
        for stored in objects:
            if limit_bytes <= 0:
                break
            if stored.offset is None or stored.place is not None or self._moving(stored):
                continue
            if self._begin_store(stored, demote=False):
                begun.append(self._stores[stored.generation])
                limit_bytes -= stored.space
        return begun

    def stored(self, store: Store, place: Place | None) -> None:
        """A write has ended; None = it is not on disk."""
        stored, catalog = store.object, self._catalog
        del self._stores[stored.generation]
        catalog.books.arriving_bytes -= store.disk_bytes
        demote = store.demote
        if demote:
            self._keep(store)
        wanted = not catalog.is_hidden(stored) and catalog.disk is not None
        if place is not None and wanted:
            catalog.set_place(stored, place)
        elif place is not None:
            self._release(place)
        catalog.let_go(stored)
        if demote and place is not None and wanted:
            self._leave_if_unneeded(stored)

    def used(self, chain: Sequence[StoredObject]) -> None:
        """Visible objects were asked for, in the order of their chain, whose head is to outlive its tail.

        One that is being written to leave memory is not cold, and stays.
        """
        self._catalog.used(reversed(chain))
        for stored in chain if self._stores else ():
            store = self._stores.get(stored.generation)
            if store is not None and store.demote:
                self._keep(store)

    def touched(self, records: RecordArray) -> None:
        """As `used`, of the records of visible objects: for many at a time."""
        self._catalog.room.used_all(records[::-1])
        # An object that was removed meanwhile has given its record back.
        demoting = [
            store for store in self._stores.values() if store.demote and not self._catalog.is_hidden(store.object)
        ]
        wanted = set(records.tolist()) if demoting else ()
        for store in demoting:
            if store.object.record in wanted:
                self._keep(store)

    def _keep(self, store: Store) -> None:
        """It will not leave memory after all."""
        store.demote = False
        self.leaving_bytes -= store.object.space
        if not self._catalog.is_hidden(store.object):
            self._catalog.set_leaving(store.object, False)

    def load(self, stored: StoredObject) -> Load | None:
        """Begins to read a visible object that is only on disk; None = there is no memory for it."""
        assert stored.offset is None
        known = self._loads.get(stored.generation)
        if known is not None:
            return known
        self._catalog.hold(stored)
        offset = self._catalog.room.for_copy(stored.length)
        if offset is None:
            self._catalog.let_go(stored)
            return None
        self._catalog.books.reserved_bytes += stored.space
        load = self._loads[stored.generation] = Load(stored, offset)
        return load

    def is_loading(self, stored: StoredObject) -> bool:
        return stored.generation in self._loads

    def loaded(self, load: Load, good: bool) -> None:
        """A read has ended. What could not be read is lost here: the object is removed."""
        stored, catalog = load.object, self._catalog
        catalog.counters["disk_reads_failed"] += not good
        del self._loads[stored.generation]
        catalog.books.reserved_bytes -= stored.space
        if good and not catalog.is_hidden(stored):
            catalog.enter_memory(stored, load.offset)
            stored.offset = load.offset
            catalog.counters["promotions"] += 1
        else:
            catalog.space.free(load.offset, stored.length)
            if not catalog.is_hidden(stored):
                catalog.remove(stored)
        catalog.let_go(stored)

    def check(self, stored: StoredObject) -> None:
        """A visible object stays where it is until `checked`."""
        self._catalog.hold(stored)
        self._checks.append(stored)

    def checked(self, stored: StoredObject) -> None:
        self._checks.remove(stored)
        self._catalog.let_go(stored)

    def relocated(self, moved: DiskObject, source: Place, to: Place) -> bool:
        """`kvstore.disk.base.Moved`: False = nobody wants it any more, and the disk forbids it.

        It may not forbid one that is visible and has only lost its copy at `source` meanwhile: with the new one it
        would forbid all that are made later, since they have the same generation.
        """
        stored = self._catalog.find(moved.key)
        if stored is None or stored.generation != moved.generation:
            return False
        if stored.place == source:
            self._catalog.set_place(stored, to)
        else:
            self._release(to)
        return True

    def under_way(self) -> list[StoredObject]:
        """The objects that moves hold, one entry each."""
        stored = [store.object for store in self._stores.values()]
        loaded = [load.object for load in self._loads.values()]
        return [*self._checks, *stored, *loaded]

    def validate(self) -> None:
        """Raises AssertionError unless the bytes on their way are counted right."""
        stores = self._stores.values()
        assert self.leaving_bytes == sum(s.object.space for s in stores if s.demote)
        assert self._catalog.books.arriving_bytes == sum(s.disk_bytes for s in stores)

    def extents(self) -> list[tuple[int, int]]:
        """(offset, length) of memory that is being loaded."""
        return [(load.offset, load.object.length) for load in self._loads.values()]

    def _moving(self, stored: StoredObject) -> bool:
        return stored.generation in self._stores or stored.generation in self._loads

    def _too_full(self) -> bool:
        space, marks = self._catalog.space, self._catalog.room.watermarks
        used = space.used - self.leaving_bytes
        low = (marks.evict_above - marks.evict_share) * space.capacity
        self._draining = used > (low if self._draining else marks.evict_above * space.capacity)
        return self._draining

    def _begin_store(self, stored: StoredObject, *, demote: bool) -> bool:
        assert self._catalog.disk is not None
        if not self._catalog.disk.takes(stored.length):
            return False
        nbytes = self._catalog.disk.space(stored.length)
        if not self._catalog.room.on_disk(nbytes, for_demotion=demote):
            return False
        self._catalog.hold(stored)
        self._stores[stored.generation] = Store(stored, demote, nbytes)
        self._catalog.books.arriving_bytes += nbytes
        if demote:
            self.leaving_bytes += stored.space
            self._catalog.set_leaving(stored, True)
        return True

    def _leave_if_unneeded(self, stored: StoredObject) -> None:
        """It stays when a block that follows it has come to memory meanwhile, or somebody holds it."""
        rows, record = self._catalog.rows, stored.record
        self._catalog.counters["demotions"] += 1
        if not rows.holds[record] and not rows.followers_in_memory[record]:
            self._catalog.leave_memory(stored)

    def _release(self, place: Place) -> None:
        if self._catalog.disk is not None:
            self._catalog.disk.release(place)
