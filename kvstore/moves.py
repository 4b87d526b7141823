"""Decides which objects move between memory and disk, and records the results. Pure.

Demotion runs ahead of need: above the high watermark the coldest objects are written to disk, and leave memory once
they are written. Promotion happens when an object that is only on disk is requested. A move holds its object, so that
the only other thing that can happen to it is removal, which makes the move's result worthless.
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
    """An object being written to disk. The shell writes it and calls `Moves.stored`."""

    object: StoredObject
    demote: bool  # the object leaves memory afterwards
    disk_bytes: int


@dataclass(slots=True, eq=False)
class Load:
    """An object being read from disk into `offset`. The shell reads it and calls `Moves.loaded`."""

    object: StoredObject
    offset: int


class Moves:
    """The moves in flight of one catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._stores: dict[int, Store] = {}  # by generation
        self._loads: dict[int, Load] = {}
        self._checks: list[StoredObject] = []
        self.leaving_bytes = 0
        """Memory that will be free once the demotions in flight have ended."""
        self._draining = False  # above the high watermark, and not yet below the low one

    @property
    def num_stores(self) -> int:
        """Number of writes in flight, writes of empty objects included."""
        return len(self._stores)

    def demotions(self, limit_bytes: int) -> list[Store]:
        """Starts the next demotions, up to `limit_bytes`, which the last object may exceed; none below the watermarks.

        An object that already has a disk copy leaves memory at once.
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
        """Starts writes of those `objects` that are only in memory and not moving. They stay in memory. The last one
        may exceed `limit_bytes`."""
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
        """Ends a write. `place` None = the object was not written."""
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
        """Records a use of visible objects, in the order of their chain, whose head is to outlive its tail.

        An object that is being demoted is not cold any more, and stays in memory.
        """
        self._catalog.used(reversed(chain))
        for stored in chain if self._stores else ():
            store = self._stores.get(stored.generation)
            if store is not None and store.demote:
                self._keep(store)

    def touched(self, records: RecordArray) -> None:
        """Records a use of many visible objects by record, like `used`."""
        self._catalog.room.used_all(records[::-1])
        # The record of a removed object may belong to another one by now.
        demoting = [
            store for store in self._stores.values() if store.demote and not self._catalog.is_hidden(store.object)
        ]
        wanted = set(records.tolist()) if demoting else ()
        for store in demoting:
            if store.object.record in wanted:
                self._keep(store)

    def _keep(self, store: Store) -> None:
        """Cancels a demotion: the object is still written, but stays in memory."""
        store.demote = False
        self.leaving_bytes -= store.object.space
        if not self._catalog.is_hidden(store.object):
            self._catalog.set_leaving(store.object, False)

    def load(self, stored: StoredObject) -> Load | None:
        """Starts to read a visible object that is only on disk, or returns its read in flight. None = no memory."""
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
        """Ends a read. An object that could not be read is lost here, and removed."""
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
        """Holds a visible object where it is until `checked` is called."""
        self._catalog.hold(stored)
        self._checks.append(stored)

    def checked(self, stored: StoredObject) -> None:
        self._checks.remove(stored)
        self._catalog.let_go(stored)

    def relocated(self, moved: DiskObject, source: Place, to: Place) -> bool:
        """Records that compaction moved a disk copy (`kvstore.disk.base.Moved`).

        Returns False if the object is gone: the disk then writes a tombstone. A visible object that only lost its copy
        at `source` meanwhile must not return False: a tombstone would also hide its later copies, which have the same
        generation.
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
        """Returns the objects that moves and checks hold, one entry per hold."""
        stored = [store.object for store in self._stores.values()]
        loaded = [load.object for load in self._loads.values()]
        return [*self._checks, *stored, *loaded]

    def validate(self) -> None:
        """Raises AssertionError unless the counters of bytes in flight are right."""
        stores = self._stores.values()
        assert self.leaving_bytes == sum(s.object.space for s in stores if s.demote)
        assert self._catalog.books.arriving_bytes == sum(s.disk_bytes for s in stores)

    def extents(self) -> list[tuple[int, int]]:
        """Returns (offset, length) of memory that is being loaded."""
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
        """Frees the memory of a written object, unless it has a hold or a follower has come to memory meanwhile."""
        rows, record = self._catalog.rows, stored.record
        self._catalog.counters["demotions"] += 1
        if not rows.holds[record] and not rows.followers_in_memory[record]:
            self._catalog.leave_memory(stored)

    def _release(self, place: Place) -> None:
        if self._catalog.disk is not None:
            self._catalog.disk.release(place)
