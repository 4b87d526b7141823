"""Decides which objects move between memory and disk, and records the results. Pure.

Demotion runs ahead of need: above the high watermark the coldest objects are written to disk, and leave memory once
they are written. Promotion happens when an object that is only on disk is requested. A move holds its object, so that
the only other thing that can happen to it is removal, which makes the move's result worthless.
"""

from collections.abc import Sequence

from moonserve.kvstore.disk.base import DiskObject, Place
from moonserve.kvstore.index_layout import RecordArray
from moonserve.kvstore.state.catalog import Catalog
from moonserve.kvstore.state.objects import DiskReadMove, DiskWriteMove, StoredObject


class TierMoves:
    """The moves in flight of one catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._stores: dict[int, DiskWriteMove] = {}  # by generation
        self._loads: dict[int, DiskReadMove] = {}
        self._checks: list[StoredObject] = []
        self.demoting_bytes = 0
        """Memory that will be free once the demotions in flight have ended."""
        self._draining = False  # above the high watermark, and not yet below the low one

    @property
    def num_writes(self) -> int:
        """Number of writes in flight, writes of empty objects included."""
        return len(self._stores)

    def demotions(self, limit_bytes: int) -> list[DiskWriteMove]:
        """Starts the next demotions, up to `limit_bytes`, which the last object may exceed; none below the watermarks.

        An object that already has a disk copy leaves memory at once.
        """
        begun: list[DiskWriteMove] = []
        while limit_bytes > 0 and self._too_full():
            stored = self._catalog.evictor.next_to_demote()
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

    def copy(self, stored: StoredObject) -> DiskWriteMove | None:
        """Starts to write an object to disk that is only in memory and not moving; it stays in memory. None = it is
        not, or the disk has no room."""
        moves = stored.generation in self._stores or stored.generation in self._loads
        if stored.offset is None or stored.place is not None or moves or not self._begin_store(stored, demote=False):
            return None
        return self._stores[stored.generation]

    def write_ended(self, store: DiskWriteMove, place: Place | None) -> None:
        """Ends a write. `place` None = the object was not written."""
        stored, catalog = store.object, self._catalog
        del self._stores[stored.generation]
        catalog.accounting.disk_writing_bytes -= store.disk_bytes
        demote = store.demote
        if demote:
            self._cancel_demotion(store)
        wanted = not catalog.is_hidden(stored) and catalog.disk is not None
        if place is not None and wanted:
            catalog.set_disk_copy(stored, place)
        elif place is not None:
            self._release(place)
        catalog.drop_hold(stored)
        if demote and place is not None and wanted:
            self._leave_if_unneeded(stored)

    def record_uses(self, chain: Sequence[StoredObject]) -> None:
        """Records a use of visible objects, in the order of their chain, whose head is to outlive its tail.

        An object that is being demoted is not cold any more, and stays in memory.
        """
        self._catalog.used(reversed(chain))
        for stored in chain if self._stores else ():
            store = self._stores.get(stored.generation)
            if store is not None and store.demote:
                self._cancel_demotion(store)

    def record_uses_by_record(self, records: RecordArray) -> None:
        """Records a use of many visible objects by record, like `record_uses`."""
        self._catalog.evictor.used_all(records[::-1])
        # The record of a removed object may belong to another one by now.
        demoting = [
            store for store in self._stores.values() if store.demote and not self._catalog.is_hidden(store.object)
        ]
        wanted = set(records.tolist()) if demoting else ()
        for store in demoting:
            if store.object.record in wanted:
                self._cancel_demotion(store)

    def _cancel_demotion(self, store: DiskWriteMove) -> None:
        """Cancels a demotion: the object is still written, but stays in memory."""
        store.demote = False
        self.demoting_bytes -= store.object.space
        if not self._catalog.is_hidden(store.object):
            self._catalog.set_leaving(store.object, False)

    def start_read(self, stored: StoredObject) -> DiskReadMove | None:
        """Starts to read a visible object that is only on disk, or returns its read in flight. None = no memory."""
        assert stored.offset is None
        known = self._loads.get(stored.generation)
        if known is not None:
            return known
        self._catalog.hold(stored)
        offset = self._catalog.evictor.allocate_for_copy(stored.length)
        if offset is None:
            self._catalog.drop_hold(stored)
            return None
        self._catalog.accounting.reserved_bytes += stored.space
        load = self._loads[stored.generation] = DiskReadMove(stored, offset)
        return load

    def is_loading(self, stored: StoredObject) -> bool:
        return stored.generation in self._loads

    def read_ended(self, load: DiskReadMove, good: bool) -> None:
        """Ends a read. An object that could not be read is lost here, and removed."""
        stored, catalog = load.object, self._catalog
        catalog.counters["disk_reads_failed"] += not good
        del self._loads[stored.generation]
        catalog.accounting.reserved_bytes -= stored.space
        if good and not catalog.is_hidden(stored):
            catalog.enter_memory(stored, load.offset)
            stored.offset = load.offset
            catalog.counters["promotions"] += 1
        else:
            catalog.allocator.free(load.offset, stored.length)
            if not catalog.is_hidden(stored):
                catalog.remove(stored)
        catalog.drop_hold(stored)

    def hold_for_check(self, stored: StoredObject) -> None:
        """Holds a visible object where it is until `release_after_check` is called."""
        self._catalog.hold(stored)
        self._checks.append(stored)

    def release_after_check(self, stored: StoredObject) -> None:
        self._checks.remove(stored)
        self._catalog.drop_hold(stored)

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
            self._catalog.set_disk_copy(stored, to)
        else:
            self._release(to)
        return True

    def in_flight(self) -> list[StoredObject]:
        """Returns the objects that moves and checks hold, one entry per hold."""
        stored = [store.object for store in self._stores.values()]
        return [*self._checks, *stored, *(load.object for load in self._loads.values())]

    def validate(self) -> None:
        """Raises AssertionError unless the counters of bytes in flight are right."""
        stores = self._stores.values()
        assert self.demoting_bytes == sum(s.object.space for s in stores if s.demote)
        assert self._catalog.accounting.disk_writing_bytes == sum(s.disk_bytes for s in stores)

    def reading_extents(self) -> list[tuple[int, int]]:
        """Returns (offset, length) of memory that is being loaded."""
        return [(load.offset, load.object.length) for load in self._loads.values()]

    def _too_full(self) -> bool:
        space, marks = self._catalog.allocator, self._catalog.evictor.watermarks
        used = space.used - self.demoting_bytes
        low = (marks.evict_above - marks.evict_share) * space.capacity
        self._draining = used > (low if self._draining else marks.evict_above * space.capacity)
        return self._draining

    def _begin_store(self, stored: StoredObject, *, demote: bool) -> bool:
        assert self._catalog.disk is not None
        if not self._catalog.disk.takes(stored.length):
            return False
        nbytes = self._catalog.disk.space(stored.length)
        if not self._catalog.evictor.make_disk_space(nbytes, for_demotion=demote):
            return False
        self._catalog.hold(stored)
        self._stores[stored.generation] = DiskWriteMove(stored, demote, nbytes)
        self._catalog.accounting.disk_writing_bytes += nbytes
        if demote:
            self.demoting_bytes += stored.space
            self._catalog.set_leaving(stored, True)
        return True

    def _leave_if_unneeded(self, stored: StoredObject) -> None:
        """Frees the memory of a written object, unless it has a hold or a follower has come to memory meanwhile."""
        rows, record = self._catalog.rows, stored.record
        self._catalog.counters["demotions"] += 1
        if not rows.holds[record] and not rows.num_children_in_memory[record]:
            self._catalog.leave_memory(stored)

    def _release(self, place: Place) -> None:
        if self._catalog.disk is not None:
            self._catalog.disk.release(place)
