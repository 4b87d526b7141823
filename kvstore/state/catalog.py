"""Catalog of one node's objects: which are resident, where their copies lie, how much space they take. Pure.

An object is reserved while it is being written, visible and immutable once committed, hidden if it was removed while
held, and gone when its space is free again. A visible object has a copy in memory, on disk, or both;
`kvstore.state.tiering` moves it between them. **A block is never evicted before the blocks that follow it in its
chain**: blocks still being written count as followers too, so that a chain does not lose its head while its tail
arrives. **The index changes before space is reused**, so that a reader that copied in between can notice. Reservations
and leases belong to `kvstore.state.reservations` and `kvstore.state.leases`; the catalog only counts holds.
`kvstore.state.eviction.evictor` decides what is evicted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from moonserve.kvstore.disk.base import DiskSpace, Pin, Place
from moonserve.kvstore.index_layout import NO_RECORD, Entry, Record, RecordArray
from moonserve.kvstore.published_index import KeyIndex
from moonserve.kvstore.state.allocator import Allocator
from moonserve.kvstore.state.catalog_tables import NO_PLACE, GenerationClock, HiddenSpace, Records, SpaceAccounting
from moonserve.kvstore.state.eviction.base import EvictionPolicy
from moonserve.kvstore.state.eviction.evictor import ChildCounts, Evictor
from moonserve.kvstore.state.eviction.quotas import TenantShares
from moonserve.kvstore.state.objects import ObjectListener, PutRequest, StoredObject, Usage, Watermarks
from moonserve.protocol.kv_blocks import BlockKey, pack_keys


class Catalog:
    """The resident objects of one segment, and of the disk behind it if there is one."""

    def __init__(
        self,
        capacity: int,
        *,
        index: KeyIndex,
        policies: Callable[[], EvictionPolicy],
        announce: ObjectListener,
        watermarks: Watermarks,
        quotas: Mapping[str, int] | None = None,
        disk: DiskSpace | None = None,
        first_generation: int = 1,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.allocator = Allocator(capacity)
        self.disk: DiskSpace | None = None
        self.rows = Records()
        self.generation_clock = GenerationClock()
        self.accounting = SpaceAccounting(self.allocator)
        self._index = index
        self._announce = announce
        self._shares = TenantShares(self.allocator.capacity, quotas or {}, policies)
        self._reserved: dict[BlockKey, StoredObject] = {}
        self._child_counts = ChildCounts(self.rows, index)
        self.evictor = Evictor(self, index, self._shares, watermarks)
        self._next_generation = first_generation
        if disk is not None:
            self.use_disk(disk)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def latest_generation(self) -> int:
        """The last generation that was assigned."""
        return self._next_generation - 1

    def find(self, key: BlockKey) -> StoredObject | None:
        """Returns the visible object of `key`, if any."""
        entry = self._index.find(key)
        return None if entry is None else self._stored(key, entry)

    def entry(self, key: BlockKey) -> Entry | None:
        """Returns the index entry of `key`, which readers use; cheaper than `find`."""
        return self._index.find(key)

    def present(self, keys: Sequence[BlockKey]) -> list[bool]:
        present: list[bool] = (self._index.records_in(pack_keys(keys)) != NO_RECORD).tolist()
        return present

    def records_among(self, packed_keys: bytes) -> RecordArray:
        """Returns the records of the visible keys, in order. Keys are packed, 16 bytes each."""
        records = self._index.records_in(packed_keys)
        there: RecordArray = records[records != NO_RECORD]
        return there

    def objects(self) -> Iterator[StoredObject]:
        """Iterates over all visible objects. The catalog may change between two `next` calls: then objects that are
        added or removed may be missed, and an object that is stored again may be returned twice."""
        for record in range(len(self.rows.holds)):
            key = self.rows.key(record)
            entry = self._index.find(key)
            if entry is not None and entry.record == record:
                yield self._stored(key, entry)

    def _stored(self, key: BlockKey, entry: Entry) -> StoredObject:
        rows, record = self.rows, entry.record
        stored = StoredObject(key, rows.parent(record), entry.length, entry.generation)
        stored.tenant = self._shares.name(rows.tenants[record])
        stored.pin = rows.pin(record)
        stored.checksum, stored.offset = entry.checksum, entry.offset
        stored.place = Place(rows.disk_places[record]) if rows.on_disk(record) else None
        stored.record = record
        return stored

    def is_reserved(self, key: BlockKey) -> bool:
        return key in self._reserved

    def used(self, objects: Iterable[StoredObject]) -> None:
        """Records a use of each of these visible objects; the last one is the most recent."""
        for stored in objects:
            self.evictor.used(stored.record)

    # The life of an object

    def reserve(self, request: PutRequest) -> StoredObject | None:
        """Reserves space for an object that is neither visible nor reserved, evicting as needed. None = no space."""
        assert request.key not in self._reserved
        self._count_child(request.parent, 1)  # first, so that making room does not evict the parent
        offset = self.evictor.allocate_for_put(request.length, request.tenant)
        if offset is None:
            self._count_child(request.parent, -1)
            return None
        stored = StoredObject(request.key, request.parent, request.length, self.take_generation())
        stored.tenant, stored.pin, stored.is_copied = request.tenant, request.pin, request.is_copied
        stored.hints = request.hints
        stored.offset = offset
        self._reserved[request.key] = stored
        self.accounting.reserved_bytes += stored.space
        self._shares.charge(request.tenant, stored.space)
        return stored

    def publish(self, stored: StoredObject, checksum: int) -> None:
        """Makes a reserved object visible, in memory."""
        assert stored.offset is not None
        del self._reserved[stored.key]
        self.accounting.reserved_bytes -= stored.space
        # A new generation, so that it is later than anything removed while it was being written.
        stored.generation = self.take_generation()
        stored.checksum = checksum
        self._admit(stored)

    def discard(self, stored: StoredObject) -> None:
        """Drops a reserved object and frees its space."""
        assert stored.offset is not None
        del self._reserved[stored.key]
        self.accounting.reserved_bytes -= stored.space
        self._count_child(stored.parent, -1)
        self._shares.charge(stored.tenant, -stored.space)
        self.allocator.free(stored.offset, stored.length)

    def restore(self, stored: StoredObject) -> bool:
        """Makes an object that was found on disk visible there.

        Returns False if its key is reserved or has an object at least as recent, or the disk is full or gone.
        """
        assert stored.place is not None
        self._next_generation = max(self._next_generation, stored.generation + 1)
        if self.disk is None or stored.key in self._reserved:
            return False
        known = self.find(stored.key)
        if known is not None and known.generation >= stored.generation:
            return False
        on_disk = known is not None and known.place is not None
        freed = self.disk.space(known.length) if known is not None and on_disk else 0
        if self.disk.space(stored.length) > self.accounting.disk_free(self.disk) + freed:
            return False
        if known is not None:
            self.remove(known)
        self._count_child(stored.parent, 1, in_memory=False)
        self.accounting.disk_live += self.disk.space(stored.length)
        self._shares.charge(stored.tenant, stored.space)
        self._admit(stored)
        return True

    def remove(self, stored: StoredObject) -> None:
        """Removes a visible object; it is hidden while it is held. Releases its place on disk."""
        record = stored.record
        self._index.remove(stored.key)
        self.evictor.forget(record)
        self.evictor.share(record).nbytes -= stored.space
        self._announce.removed(stored.key)
        self.drop_disk_copy(record, stored.length)
        holds, in_memory = self.rows.holds[record], self.rows.in_memory(record)
        stays = in_memory and not self.rows.is_leaving(record)
        self._child_counts.move_from_row(stored.key, record)
        self.rows.free(record)
        self.accounting.num_on_disk -= not in_memory
        if holds:
            self.accounting.hidden[stored.generation] = HiddenSpace(stored.offset, stored.length, holds)
            self.accounting.num_leased -= 1
        elif stored.offset is not None:
            self.allocator.free(stored.offset, stored.length)
        self._count_child(stored.parent, -1, in_memory=stays)

    def hold(self, stored: StoredObject) -> None:
        """Adds a hold to a visible object, which may then neither be evicted nor moved."""
        self.rows.holds[stored.record] += 1
        if self.rows.holds[stored.record] == 1:
            self.accounting.num_leased += 1
            self.accounting.leased_bytes += stored.space if self.rows.in_memory(stored.record) else 0
            self.evictor.withdraw(stored.record)

    def drop_hold(self, stored: StoredObject) -> None:
        """Drops one hold. The last hold of a hidden object frees its space."""
        if self.is_hidden(stored):
            self.accounting.drop_hidden_hold(stored.generation)
            return
        self.rows.holds[stored.record] -= 1
        if not self.rows.holds[stored.record]:
            self.accounting.num_leased -= 1
            self.accounting.leased_bytes -= stored.space if self.rows.in_memory(stored.record) else 0
            self.evictor.update_candidacy(stored.record)

    def set_pin(self, stored: StoredObject, pin: Pin) -> None:
        """Sets the pin of a visible object."""
        self.evictor.withdraw(stored.record)
        self.rows.set_pin(stored.record, pin)
        self.evictor.update_candidacy(stored.record)

    # Copies

    def is_hidden(self, stored: StoredObject) -> bool:
        """Returns True if this held object was removed meanwhile."""
        return stored.generation in self.accounting.hidden

    def set_disk_copy(self, stored: StoredObject, place: Place) -> None:
        """Sets where the disk copy of a visible object is, whether it is new or was moved."""
        assert self.disk is not None
        if not self.rows.on_disk(stored.record):
            self.accounting.disk_live += self.disk.space(stored.length)
            self.accounting.num_disk_copies += 1
        self.rows.disk_places[stored.record] = place

    def drop_disk_copy(self, record: Record, length: int) -> None:
        """Drops the disk copy of a record, if any, and releases its place. `length` is the object's."""
        if self.rows.on_disk(record):
            assert self.disk is not None
            self.accounting.disk_live -= self.disk.space(length)
            self.accounting.num_disk_copies -= 1
            self.disk.release(Place(self.rows.disk_places[record]))
            self.rows.disk_places[record] = NO_PLACE

    def drop_some_disk_copy(self) -> bool:
        """Drops the disk copy of some object that is also in memory. Returns False if none was found."""
        record = (
            self.rows.next_spare_copy() if self.accounting.num_disk_copies > self.accounting.num_on_disk else NO_RECORD
        )
        entry = None if record == NO_RECORD else self._index.find(self.rows.key(record))
        if entry is None:
            return False
        self.drop_disk_copy(record, entry.length)
        self.counters["copies_dropped"] += 1
        return True

    def enter_memory(self, stored: StoredObject, offset: int) -> None:
        """Records that a visible object that was only on disk now has a copy in memory, at `offset`."""
        record = stored.record
        self.evictor.remove(record)
        self.rows.set_in_memory(record, True)
        self.accounting.num_on_disk -= 1
        self.accounting.leased_bytes += stored.space if self.rows.holds[record] else 0
        self._index.relocate(stored.key, offset)
        self._child_counts.count(stored.parent, 0, 1, self.evictor.update_candidacy)
        self._entered(stored)

    def set_leaving(self, stored: StoredObject, leaving: bool) -> None:
        """Marks a visible object in memory as leaving it, or no longer leaving. Its parent may be demoted meanwhile:
        demotion goes from the end of a chain to its head, and would otherwise wait for each write."""
        if self.rows.is_leaving(stored.record) is not leaving:
            self.rows.set_leaving(stored.record, leaving)
            change = -1 if leaving else 1
            self._child_counts.count(stored.parent, 0, change, self.evictor.update_candidacy)

    def leave_memory(self, stored: StoredObject) -> None:
        """Frees the memory copy of a visible object without holds; its disk copy stays."""
        record = stored.record
        assert stored.offset is not None
        assert self.rows.on_disk(record)
        assert not self.rows.holds[record]
        self.evictor.remove(record)
        self.rows.set_in_memory(record, False)
        self.accounting.num_on_disk += 1
        self._index.relocate(stored.key, None)
        self.allocator.free(stored.offset, stored.length)
        self._child_counts.count(stored.parent, 0, -1, self.evictor.update_candidacy)
        self._entered(stored)

    def _entered(self, stored: StoredObject) -> None:
        """Enters an object into the policy of the tier that now has its fastest copy, and announces the tier."""
        self.evictor.add(stored.record, stored.key, stored.parent)
        self._announce.moved(stored.key, self.evictor.tier(stored.record))

    def use_disk(self, disk: DiskSpace) -> None:
        """Adds a disk behind the memory."""
        self.disk = disk
        self._shares.resize(self.allocator.capacity + disk.live_limit)

    def forget_disk(self) -> None:
        """Removes the disk, and every object that was only there."""
        for stored in list(self.objects()):
            if stored.offset is None:
                self.remove(stored)
            else:
                self.drop_disk_copy(stored.record, stored.length)
        self.disk = None
        self._shares.resize(self.allocator.capacity)

    def usage(self) -> Usage:
        return self.accounting.usage(len(self._index), self.disk, self._shares.used_by_tenant())

    @property
    def metadata_bytes(self) -> int:
        """Memory of the index, the rows and the policies, in bytes."""
        return self._index.nbytes + self.rows.nbytes + self._shares.nbytes

    # Bookkeeping

    def take_generation(self) -> int:
        """Assigns the next generation, which is later than all before."""
        self._next_generation += 1
        return self._next_generation - 1

    def _admit(self, stored: StoredObject) -> None:
        """Makes an object visible in the tiers it is in. Its parent already counts it as a follower."""
        rows = self.rows
        tenant = self._shares.number(stored.tenant)
        stored.record = rows.add(stored.key, stored.parent, tenant, stored.pin)
        rows.set_in_memory(stored.record, stored.offset is not None)
        rows.set_copied(stored.record, stored.is_copied)
        self.accounting.num_on_disk += stored.offset is None
        if stored.place is not None:
            rows.disk_places[stored.record] = stored.place
            self.accounting.num_disk_copies += 1
        self._child_counts.move_to_row(stored.key, stored.record)
        entry = Entry(stored.record, stored.generation, stored.checksum, stored.length, stored.offset)
        self._index.insert(stored.key, entry)
        self.evictor.add(stored.record, stored.key, stored.parent)
        self.evictor.hint(stored.record, stored.hints, stored.space, is_new=True)
        self._announce.added(stored.key, stored.parent, self.evictor.tier(stored.record))

    def _count_child(self, parent: BlockKey | None, change: int, *, in_memory: bool = True) -> None:
        self._child_counts.count(parent, change, change * in_memory, self.evictor.update_candidacy)

    def validate(
        self,
        *,
        held: Iterable[StoredObject],
        reserved: Iterable[StoredObject],
        loading: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Raises AssertionError unless space, counts and chains agree with the objects and with exactly these holds
        (one entry per hold), reservations and extents (offset, length) being loaded."""
        visible = list(self.objects())
        assert len(visible) == len(self._index) == len(self.rows)
        self._index.validate()
        waiting = list(self._reserved.values())
        assert {o.generation for o in reserved} == {o.generation for o in waiting}
        usage = self.usage()
        assert usage.free_bytes + usage.held_bytes + usage.leased_bytes + usage.reserved_bytes == usage.capacity_bytes
        self.accounting.validate(
            visible,
            self.rows,
            self.disk,
            writing=[(o.offset, o.length) for o in waiting],
            loading=list(loading),
        )
        self.evictor.validate()
        self._shares.validate((o.tenant, o.space) for o in (*visible, *waiting))
        holds = Counter(stored.generation for stored in held)
        counted = Counter({o.generation: self.rows.holds[o.record] for o in visible})
        assert holds == counted + Counter({g: r.holds for g, r in self.accounting.hidden.items()})
        stays = [o.offset is not None and not self.rows.is_leaving(o.record) for o in visible]
        following = zip((*visible, *waiting), (*stays, *(True for _ in waiting)), strict=True)
        self._child_counts.validate((o.parent, here) for o, here in following if o.parent)
