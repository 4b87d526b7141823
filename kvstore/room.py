"""Room for what comes: which objects of a catalog leave memory, disk or a tenant's quota for it. Pure.

Policies say who is next (`kvstore.shares`), here is decided what that means: an object with a copy on disk only leaves
memory, any other one is evicted, and **no block is evicted before those that follow it in its chain**.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.allocator import padded
from kvstore.candidates import Candidates
from kvstore.native.base import NO_RECORD, Record
from kvstore.shares import Share, Shares
from kvstore.stored import StoredObject, Tier, Watermarks

if TYPE_CHECKING:
    from kvstore.catalog import Catalog

# How many victims that cannot go yet are passed over before there counts as no room.
MAX_PASSED_OVER = 64


class Room:
    """Decides for one catalog, which does it."""

    def __init__(
        self, catalog: Catalog, candidates: Candidates, shares: Shares, watermarks: Watermarks
    ) -> None:
        self.watermarks = watermarks
        self._catalog = catalog
        self._candidates = candidates
        self._shares = shares

    def for_new(self, length: int, tenant: str) -> int | None:
        """Memory for a new object of a tenant, within its quota."""
        share = self._shares.own(tenant)
        if share is not None and not self._within(share, padded(length)):
            return None
        return self.for_copy(length)

    def for_copy(self, length: int) -> int | None:
        """Memory for a copy of `length` bytes, evicting as needed."""
        catalog = self._catalog
        if padded(length) > catalog.books.evictable_bytes:
            return None  # evicting all of them would not help
        while (offset := catalog.space.allocate(length)) is None:
            if not self._vacate_one():
                return None
        return offset

    def trim(self) -> None:
        """Without a disk: evicts down to the low watermark when use is above the high one."""
        space, marks = self._catalog.space, self.watermarks
        if space.used <= marks.evict_above * space.capacity:
            return
        target = (marks.evict_above - marks.evict_share) * space.capacity
        while space.used > target and self._vacate_one():
            pass

    def on_disk(self, nbytes: int, *, for_demotion: bool) -> bool:
        """Evicts from disk until `nbytes` more are within what it may hold.

        For a demotion copies of what is in memory go too, since nothing is lost with them; one copy for another would
        only be work.
        """
        while self._catalog.books.disk_free(self._catalog.disk) < nbytes:
            cold = self._object(self._shares.victim(Tier.DISK))
            if cold is None and for_demotion and self._catalog.drop_a_copy():
                continue
            if not self._evict(cold):
                return False
        return True

    def coldest_in_memory(self) -> StoredObject | None:
        """What would leave memory for the disk first. An object that the disk cannot take stays until its memory is
        needed."""
        return self._first(lambda: self._shares.victim(Tier.MEMORY), self._disk_takes)

    def _within(self, share: Share, nbytes: int) -> bool:
        """Evicts a tenant's own objects until its quota has room; those only on disk are the colder ones."""

        def coldest() -> Record:
            on_disk = share.offers[Tier.DISK].victim()
            return on_disk if on_disk != NO_RECORD else share.offers[Tier.MEMORY].victim()

        while share.nbytes + nbytes > share.size:
            if nbytes > share.size or not self._evict(self._first(coldest, self._is_leaf)):
                self._catalog.counters["quota_refusals"] += 1
                return False
        return True

    def _vacate_one(self) -> bool:
        """Takes one object out of memory: to disk where it has a copy, otherwise for good."""
        stored = self._first(lambda: self._shares.victim(Tier.MEMORY), self._may_leave_memory)
        if stored is None or stored.place is None:
            return self._evict(stored)
        self._catalog.leave_memory(stored)
        return True

    def _may_leave_memory(self, record: Record) -> bool:
        """False = the blocks that follow it are on disk, and it is not yet: it can go once it has been written."""
        return self._catalog.rows.on_disk(record) or self._is_leaf(record)

    def _disk_takes(self, record: Record) -> bool:
        stored = self._object(record)
        assert stored is not None
        disk = self._catalog.disk
        return stored.place is not None or (disk is not None and disk.takes(stored.length))

    def _is_leaf(self, record: Record) -> bool:
        return not self._catalog.rows.followers[record]

    def _first(
        self, victim: Callable[[], Record], suits: Callable[[Record], bool]
    ) -> StoredObject | None:
        """The first victim that suits. Those passed over for it stay on offer."""
        passed_over: list[Record] = []
        try:
            while (record := victim()) != NO_RECORD and len(passed_over) <= MAX_PASSED_OVER:
                if suits(record):
                    return self._object(record)
                passed_over.append(record)
                self._candidates.withdraw(record)
            return None
        finally:
            for record in passed_over:
                self._candidates.reconsider(record)

    def _evict(self, stored: StoredObject | None) -> bool:
        counters = self._catalog.counters
        counters["evictions_attempted"] += 1
        if stored is None:
            return False
        self._catalog.remove(stored)
        counters["evictions_succeeded"] += 1
        return True

    def _object(self, record: Record) -> StoredObject | None:
        if record == NO_RECORD:
            return None
        return self._catalog.find(self._catalog.rows.key(record))
