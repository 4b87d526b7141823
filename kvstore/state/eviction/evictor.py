"""Makes room in memory, on disk and within tenants' quotas: decides which objects of a catalog leave, and evicts. Pure.

An object is on offer while it has no holds, is not hard-pinned, and no block that follows it is resident in its tier
or a faster one (a block that is leaving memory does not count).

Policies choose the next victim (`kvstore.state.eviction.quotas`); this module decides what happens to it: an object
with a disk copy only leaves memory, any other is evicted. **No block is evicted before the blocks that follow it in its
chain.**
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np

from moonserve.kvstore.disk.base import DiskSpace, Pin
from moonserve.kvstore.index_layout import NO_RECORD, Record, RecordArray
from moonserve.kvstore.published_index import KeyIndex
from moonserve.kvstore.state.allocator import Allocator, padded
from moonserve.kvstore.state.catalog_tables import Records, SpaceAccounting
from moonserve.kvstore.state.eviction.base import EvictionPolicy
from moonserve.kvstore.state.eviction.quotas import EvictionCandidates, TenantShare, TenantShares
from moonserve.kvstore.state.eviction.retention import (
    MAX_CHAIN,
    MAX_KEPT_SHARE,
    HintTable,
    LeaveOrder,
    ObjectHints,
)
from moonserve.kvstore.state.objects import StoredObject, Tier, Watermarks
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import NO_HINTS, CacheHints


class ChildCounts:
    """Number of resident blocks that name each block as their parent, even if the parent is absent.

    Counts of visible parents are in their rows; counts of parents that are absent or being written are kept apart.
    """

    def __init__(self, rows: Records, index: KeyIndex) -> None:
        self._rows = rows
        self._index = index
        self._of_absent: dict[BlockKey, tuple[int, int]] = {}  # (total, in memory)

    def count(
        self,
        parent: BlockKey | None,
        change: int,
        change_in_memory: int,
        changed: Callable[[Record], None],
    ) -> None:
        """Adds to the counts of `parent`'s followers. Calls `changed` with its record if it is visible."""
        if parent is None:
            return
        record = self._index.record_of(parent)
        if record == NO_RECORD:
            total, in_memory = self._of_absent.get(parent, (0, 0))
            self._set_absent(parent, total + change, in_memory + change_in_memory)
            return
        self._rows.num_children[record] += change
        self._rows.num_children_in_memory[record] += change_in_memory
        changed(record)

    def move_to_row(self, key: BlockKey, record: Record) -> None:
        """Moves the counts of `key`, which becomes visible, into the new row of `record`."""
        total, in_memory = self._of_absent.pop(key, (0, 0))
        self._rows.num_children[record] = total
        self._rows.num_children_in_memory[record] = in_memory

    def move_from_row(self, key: BlockKey, record: Record) -> None:
        """Moves the counts of `key`, which is no longer visible, out of its row, which still exists."""
        total, in_memory = self._rows.num_children[record], self._rows.num_children_in_memory[record]
        self._set_absent(key, total, in_memory)

    def _set_absent(self, key: BlockKey, total: int, in_memory: int) -> None:
        if total:
            self._of_absent[key] = (total, in_memory)
        else:
            self._of_absent.pop(key, None)

    def validate(self, expected: Iterable[tuple[BlockKey, bool]]) -> None:
        """Raises AssertionError unless exactly these followers (parent, in memory) are counted."""
        counts: dict[BlockKey, tuple[int, int]] = {}
        for parent, in_memory in expected:
            total, among = counts.get(parent, (0, 0))
            counts[parent] = (total + 1, among + in_memory)
        for parent, counted in counts.items():
            record = self._index.record_of(parent)
            if record == NO_RECORD:
                assert self._of_absent.get(parent) == counted, "followers of an absent block"
            else:
                rows = self._rows
                assert (rows.num_children[record], rows.num_children_in_memory[record]) == counted
        absent = {key for key in counts if self._index.record_of(key) == NO_RECORD}
        assert set(self._of_absent) == absent


# Victims that cannot leave yet are skipped; after this many, there is no room.
MAX_SKIPPED_VICTIMS = 64


class EvictableObjects(Protocol):
    """What an `Evictor` uses of its catalog."""

    rows: Records
    accounting: SpaceAccounting
    allocator: Allocator
    disk: DiskSpace | None
    counters: Counter[str]

    def find(self, key: BlockKey) -> StoredObject | None: ...
    def remove(self, stored: StoredObject) -> None: ...
    def leave_memory(self, stored: StoredObject) -> None: ...
    def drop_some_disk_copy(self) -> bool: ...


class Evictor:
    """Makes room in one catalog and keeps the eviction policies of its tenants up to date."""

    def __init__(
        self, catalog: EvictableObjects, index: KeyIndex, shares: TenantShares, watermarks: Watermarks
    ) -> None:
        self.watermarks = watermarks
        self._catalog = catalog
        self._rows = catalog.rows
        self._index = index
        self._shares = shares
        self._hints = HintTable(self._parent)
        self._now = 0.0

    # What is on offer

    def tier(self, record: Record) -> Tier:
        return Tier.MEMORY if self._rows.in_memory(record) else Tier.DISK

    def share(self, record: Record) -> TenantShare:
        return self._shares.share_of(self._rows.tenants[record])

    def add(self, record: Record, key: BlockKey, parent: BlockKey | None) -> None:
        """Adds an object to the policy of its tier, and offers it if it may leave."""
        before = NO_RECORD if parent is None else self._index.record_of(parent)
        if before != NO_RECORD and self.tier(before) is not self.tier(record):
            before = NO_RECORD  # each tier has its own policy instances
        hints = self._hints.get(record)
        if hints is not None and self.tier(record) is Tier.DISK:
            self._hints.set(record, hints.unexpected())
        self._policy(record).added(record, key, before)
        self.update_candidacy(record)

    def remove(self, record: Record) -> None:
        """Removes an object from the policy of the tier that its row still names."""
        self._candidates(record).forget(record, self._order(record))

    def forget(self, record: Record) -> None:
        """Removes an object that leaves the node."""
        self.remove(record)
        self._hints.set(record, None)

    def used(self, record: Record) -> None:
        hints = self._hints.get(record)
        if hints is not None and self._hints.keeps_follower(record):  # the return of the whole chain is still expected
            self._set_hints(record, replace(hints, used_at=self._now, is_over=False))
        elif hints is not None:
            self._set_hints(record, hints.after_use(self._now))
        self._policy(record).used(record)

    def used_all(self, records: RecordArray) -> None:
        """Records uses of many records. The order is kept within each policy instance only."""
        in_memory = self._rows.in_memory_all(records)
        for share, is_its in self._shares.split(self._rows.tenants_all(records)):
            for tier, is_there in ((Tier.MEMORY, in_memory), (Tier.DISK, ~in_memory)):
                used = self._without_hinted(records[is_its & is_there])
                if len(used):
                    share.candidates[tier].policy(LeaveOrder.NORMAL).used_all(used)

    def _without_hinted(self, records: RecordArray) -> RecordArray:
        """Records uses of the objects with hints among these, and returns the others."""
        if not len(self._hints):
            return records
        is_hinted = np.fromiter(map(self._hints.__contains__, records.tolist()), np.bool_, len(records))
        for record in records[is_hinted].tolist():
            self.used(record)
        others: RecordArray = records[~is_hinted]
        return others

    def update_candidacy(self, record: Record) -> None:
        """Offers a record if its object may leave its tier, and withdraws it otherwise."""
        rows, pin = self._rows, self._rows.pin(record)
        in_memory = rows.in_memory(record)
        followers = rows.num_children_in_memory[record] if in_memory else rows.num_children[record]
        if rows.holds[record] or followers or pin is Pin.HARD:
            self.withdraw(record)
        else:
            self._candidates(record).offer(record, pin, self._order(record))

    def withdraw(self, record: Record) -> None:
        self._candidates(record).withdraw(record, self._order(record))

    def _candidates(self, record: Record) -> EvictionCandidates:
        return self.share(record).candidates[self.tier(record)]

    def _parent(self, record: Record) -> Record:
        parent = self._rows.parent(record)
        return NO_RECORD if parent is None else self._index.record_of(parent)

    def _order(self, record: Record) -> LeaveOrder:
        hints = self._hints.get(record)
        return LeaveOrder.NORMAL if hints is None else hints.order(self.tier(record))

    def _policy(self, record: Record) -> EvictionPolicy:
        return self._candidates(record).policy(self._order(record))

    # Hints

    def advance(self, now: float) -> None:
        """Sets the time, and ends the hints that are over."""
        self._now = max(self._now, now)
        for record, hints in self._hints.due(self._now):
            self._set_hints(record, hints.at_end(self._now))

    def hint(self, record: Record, hints: CacheHints, space: int, *, is_new: bool) -> None:
        """Applies the hints of a put to one of its objects. They cannot make one that was present leave earlier."""
        known = self._hints.get(record)
        if known is None and hints == NO_HINTS:
            return
        ttl_s, is_low = hints.ttl_s or math.inf, hints.low_priority
        if is_new:
            self._set_hints(record, ObjectHints(space=space, used_at=self._now, is_low=is_low, ttl_s=ttl_s))
        elif known is not None:
            is_still_low = known.is_low and is_low
            self._set_hints(record, replace(known, is_low=is_still_low, ttl_s=max(known.ttl_s, ttl_s)))
        # A put's objects become visible one after another, in the order of their chain: the last one has no followers.
        if hints.return_within_s is not None and not is_low and self._is_leaf(record):
            self._expect(record, self._now + hints.return_within_s)

    def _expect(self, record: Record, returns_by: float) -> None:
        """Expects a use of the chain that ends with `record`. Keeping it may end the keeping of others."""
        most_bytes = MAX_KEPT_SHARE * self._catalog.allocator.capacity
        chain: dict[Record, ObjectHints] = {}
        key: BlockKey | None = self._rows.key(record)
        while key is not None and (entry := self._index.find(key)) is not None and entry.offset is not None:
            if len(chain) == MAX_CHAIN or entry.record in chain:
                return
            known = self._hints.get(entry.record) or ObjectHints(space=padded(entry.length), used_at=self._now)
            is_shared = self._hints.keeps_follower(entry.record)  # and kept for as long as the other chains
            until = max(returns_by, known.returns_by) if is_shared else returns_by
            chain[entry.record] = replace(known, returns_by=until)
            key = self._rows.parent(entry.record)
        if sum(hints.kept_bytes for hints in chain.values()) > most_bytes:
            return
        for each, hints in chain.items():
            self._set_hints(each, hints)
        while self._hints.kept_bytes > most_bytes:
            last, hints = self._hints.kept_last()
            self._set_hints(last, hints.unexpected())

    def _set_hints(self, record: Record, hints: ObjectHints) -> None:
        """Sets the hints of an object, which may move it to another class."""
        before = self._order(record)
        candidates = self._candidates(record)
        candidates.withdraw(record, before)
        self._hints.set(record, hints)
        order = self._order(record)
        if candidates.policy(order) is not candidates.policy(before):
            candidates.forget(record, before)
            candidates.policy(order).added(record, self._rows.key(record), NO_RECORD)
        self.update_candidacy(record)

    def validate(self) -> None:
        """Raises AssertionError unless the hints agree with each other and keep no more than the bound."""
        self._hints.validate()
        assert self._hints.kept_bytes <= MAX_KEPT_SHARE * self._catalog.allocator.capacity

    # Making room

    def allocate_for_put(self, length: int, tenant: str) -> int | None:
        """Allocates memory for a new object within its tenant's quota, evicting as needed. None = no room."""
        share = self._shares.share_with_quota(tenant)
        if share is not None and not self._evict_within_quota(share, padded(length)):
            return None
        return self.allocate_for_copy(length)

    def allocate_for_copy(self, length: int) -> int | None:
        """Allocates memory for `length` bytes, evicting as needed. None = no room."""
        catalog = self._catalog
        if padded(length) > catalog.accounting.evictable_bytes:
            return None  # evicting everything would not be enough
        while (offset := catalog.allocator.allocate(length)) is None:
            if not self._free_one():
                return None
        return offset

    def evict_to_low_watermark(self) -> None:
        """Evicts down to the low watermark if use is above the high one. Only for nodes without a disk."""
        space, marks = self._catalog.allocator, self.watermarks
        if space.used <= marks.evict_above * space.capacity:
            return
        target = (marks.evict_above - marks.evict_share) * space.capacity
        while space.used > target and self._free_one():
            pass

    def make_disk_space(self, nbytes: int, *, for_demotion: bool) -> bool:
        """Evicts from disk until `nbytes` more fit. Returns False if they do not.

        A demotion may also replace disk copies of objects in memory, since nothing is lost with them. Replacing one
        such copy by another would be useless.
        """
        while self._catalog.accounting.disk_free(self._catalog.disk) < nbytes:
            cold = self._object(self._shares.victim(Tier.DISK))
            if cold is None and for_demotion and self._catalog.drop_some_disk_copy():
                continue
            if not self._evict(cold):
                return False
        return True

    def next_to_demote(self) -> StoredObject | None:
        """Returns the next object to demote. Objects that the disk cannot take are skipped: they stay until their
        memory is needed."""
        return self._first(lambda: self._shares.victim(Tier.MEMORY), self._disk_takes)

    def _evict_within_quota(self, share: TenantShare, nbytes: int) -> bool:
        """Evicts a tenant's own objects until its quota has room, objects that are only on disk first."""

        def coldest() -> Record:
            on_disk = share.candidates[Tier.DISK].victim()
            return on_disk if on_disk != NO_RECORD else share.candidates[Tier.MEMORY].victim()

        while share.nbytes + nbytes > share.size:
            if nbytes > share.size or not self._evict(self._first(coldest, self._is_leaf)):
                self._catalog.counters["quota_refusals"] += 1
                return False
        return True

    def _free_one(self) -> bool:
        """Takes one object out of memory. It is evicted if it has no disk copy. Returns False if none can leave."""
        stored = self._first(lambda: self._shares.victim(Tier.MEMORY), self._may_leave_memory)
        if stored is None or stored.place is None:
            return self._evict(stored)
        self._catalog.leave_memory(stored)
        return True

    def _may_leave_memory(self, record: Record) -> bool:
        """Returns False if the object has followers on disk but no disk copy: it can leave once it is written."""
        return self._rows.on_disk(record) or self._is_leaf(record)

    def _disk_takes(self, record: Record) -> bool:
        stored = self._object(record)
        assert stored is not None
        disk = self._catalog.disk
        return stored.place is not None or (disk is not None and disk.takes(stored.length))

    def _is_leaf(self, record: Record) -> bool:
        return not self._rows.num_children[record]

    def _first(self, victim: Callable[[], Record], suits: Callable[[Record], bool]) -> StoredObject | None:
        """Returns the first victim that suits. Skipped victims stay on offer."""
        passed_over: list[Record] = []
        try:
            while (record := victim()) != NO_RECORD and len(passed_over) <= MAX_SKIPPED_VICTIMS:
                if suits(record):
                    return self._object(record)
                passed_over.append(record)
                self.withdraw(record)
            return None
        finally:
            for record in passed_over:
                self.update_candidacy(record)

    def _evict(self, stored: StoredObject | None) -> bool:
        counters = self._catalog.counters
        counters["evictions_attempted"] += 1
        if stored is None:
            return False
        self._catalog.remove(stored)
        counters["evictions_succeeded"] += 1
        return True

    def _object(self, record: Record) -> StoredObject | None:
        return None if record == NO_RECORD else self._catalog.find(self._rows.key(record))
