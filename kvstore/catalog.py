"""The objects of one node: which are resident, where they lie, and which may make room for others. Pure.

An object is RESERVED while it is being written, VISIBLE once committed and immutable from then on, HIDDEN when it was
removed under a reader, and gone when its space is free again. **A block is never evicted before the blocks that follow
it in its chain**: those still being written count as followers too, so that a chain does not lose its head while its
tail arrives. Who reserves and who leases is `kvstore.state`'s business; only the number of leases is known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvstore.allocator import Allocator, padded
from kvstore.eviction import EvictionPolicy
from protocol.errors import InvalidRequest
from protocol.keys import BlockKey


class Announcements(Protocol):
    """Who wants to know what this node can serve (`protocol.membership.BlockLog`)."""

    def added(self, key: BlockKey, parent: BlockKey | None) -> None: ...

    def removed(self, key: BlockKey) -> None: ...


class Stage(StrEnum):
    """Where a resident object is in its life."""

    RESERVED = "reserved"
    VISIBLE = "visible"
    HIDDEN = "hidden"


@dataclass(slots=True, eq=False)
class StoredObject:
    """One resident object."""

    key: BlockKey
    parent: BlockKey | None  # None = its chain starts here
    offset: int
    length: int
    generation: int  # never given to another object of this node
    stage: Stage = Stage.RESERVED
    checksum: int = 0  # VISIBLE, HIDDEN
    num_leases: int = 0  # VISIBLE; HIDDEN: at least 1

    @property
    def space(self) -> int:
        """Bytes of the segment that it takes."""
        return padded(self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """Above `evict_above` of the capacity in use, objects are evicted until `evict_share` of it is free again."""

    evict_above: float = 0.90
    evict_share: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The bytes of a segment; free + held + leased + reserved = capacity."""

    capacity: int
    free: int
    held: int  # VISIBLE without a lease
    leased: int  # VISIBLE or HIDDEN, with one
    reserved: int
    num_objects: int  # VISIBLE
    num_leased: int  # of them


class Catalog:
    """The resident objects of one segment."""

    def __init__(
        self,
        capacity: int,
        *,
        policy: EvictionPolicy,
        announce: Announcements,
        watermarks: Watermarks,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._space = Allocator(capacity)
        self._policy = policy
        self._announce = announce
        self._watermarks = watermarks
        self._visible: dict[BlockKey, StoredObject] = {}
        self._reserved: dict[BlockKey, StoredObject] = {}
        self._hidden: dict[int, StoredObject] = {}  # by generation: a key may be hidden twice
        self._followers: Counter[BlockKey] = Counter()  # RESERVED and VISIBLE blocks, by parent
        self._num_generations = 0
        self._leased_bytes = 0
        self._reserved_bytes = 0
        self._num_leased = 0

    def find(self, key: BlockKey) -> StoredObject | None:
        """The object that readers see under `key`."""
        return self._visible.get(key)

    def is_reserved(self, key: BlockKey) -> bool:
        return key in self._reserved

    def used(self, objects: Iterable[StoredObject]) -> None:
        """Counts as a use of each of the VISIBLE objects, the last one the most recent."""
        for stored in objects:
            self._policy.used(stored.key)

    def check_size(self, length: int) -> None:
        """Raises InvalidRequest when an object could never fit."""
        if padded(length) > self._space.capacity:
            raise InvalidRequest(
                f"an object of {length} bytes does not fit into this store's segment of"
                f" {self._space.capacity} bytes",
                param="length",
            )

    def reserve(self, key: BlockKey, parent: BlockKey | None, length: int) -> StoredObject | None:
        """A place for an object that is neither VISIBLE nor RESERVED, evicting as needed; None = nothing to evict."""
        assert key not in self._visible
        assert key not in self._reserved
        self._follow(parent)  # first, so that making room does not evict the parent
        offset = self._make_room(length)
        if offset is None:
            self._unfollow(parent)
            return None
        self._num_generations += 1
        stored = StoredObject(key, parent, offset, length, self._num_generations)
        self._reserved[key] = stored
        self._reserved_bytes += stored.space
        return stored

    def publish(self, stored: StoredObject, checksum: int) -> None:
        """RESERVED → VISIBLE."""
        del self._reserved[stored.key]
        self._reserved_bytes -= stored.space
        stored.stage, stored.checksum = Stage.VISIBLE, checksum
        self._visible[stored.key] = stored
        self._policy.added(stored.key, stored.parent)
        self._reconsider(stored.key)
        self._announce.added(stored.key, stored.parent)

    def discard(self, stored: StoredObject) -> None:
        """RESERVED → gone."""
        del self._reserved[stored.key]
        self._reserved_bytes -= stored.space
        self._unfollow(stored.parent)
        self._space.free(stored.offset)

    def remove(self, stored: StoredObject) -> None:
        """VISIBLE → gone, or HIDDEN while there are leases."""
        del self._visible[stored.key]
        self._policy.forget(stored.key)
        self._unfollow(stored.parent)
        self._announce.removed(stored.key)
        if stored.num_leases:
            stored.stage = Stage.HIDDEN
            self._hidden[stored.generation] = stored
            self._num_leased -= 1
        else:
            self._space.free(stored.offset)

    def hold(self, stored: StoredObject) -> None:
        """One more lease on a VISIBLE object."""
        stored.num_leases += 1
        if stored.num_leases == 1:
            self._leased_bytes += stored.space
            self._num_leased += 1
            self._policy.withdraw(stored.key)

    def let_go(self, stored: StoredObject) -> None:
        """One lease less; the last one of a HIDDEN object frees its space."""
        stored.num_leases -= 1
        if stored.num_leases:
            return
        self._leased_bytes -= stored.space
        if stored.stage is Stage.HIDDEN:
            del self._hidden[stored.generation]
            self._space.free(stored.offset)
        else:
            self._num_leased -= 1
            self._reconsider(stored.key)

    def trim(self) -> None:
        """Evicts down to the low watermark when use is above the high one."""
        capacity, marks = self._space.capacity, self._watermarks
        if self._space.used <= marks.evict_above * capacity:
            return
        target = (marks.evict_above - marks.evict_share) * capacity
        while self._space.used > target and self._evict_one():
            pass

    def usage(self) -> Usage:
        held = self._space.used - self._leased_bytes - self._reserved_bytes
        return Usage(
            capacity=self._space.capacity,
            free=self._space.free_bytes,
            held=held,
            leased=self._leased_bytes,
            reserved=self._reserved_bytes,
            num_objects=len(self._visible),
            num_leased=self._num_leased,
        )

    def _make_room(self, length: int) -> int | None:
        wanted = padded(length)
        if wanted > self._space.capacity - self._leased_bytes - self._reserved_bytes:
            return None  # evicting all the rest would not help
        while (offset := self._space.allocate(length)) is None:
            if not self._evict_one():
                return None
        return offset

    def _evict_one(self) -> bool:
        self.counters["evictions_attempted"] += 1
        key = self._policy.victim()
        if key is None:
            return False
        self.remove(self._visible[key])
        self.counters["evictions_succeeded"] += 1
        return True

    def _follow(self, parent: BlockKey | None) -> None:
        if parent is not None:
            self._followers[parent] += 1
            self._policy.withdraw(parent)

    def _unfollow(self, parent: BlockKey | None) -> None:
        if parent is None:
            return
        self._followers[parent] -= 1
        if not self._followers[parent]:
            del self._followers[parent]
            self._reconsider(parent)

    def _reconsider(self, key: BlockKey) -> None:
        """Offers `key` for eviction if nothing speaks against it any more."""
        stored = self._visible.get(key)
        if stored is not None and not stored.num_leases and key not in self._followers:
            self._policy.offer(key)

    def validate(self) -> None:
        """Raises AssertionError unless space, counts and chains agree with the objects."""
        self._space.validate()
        residents = [*self._visible.values(), *self._reserved.values(), *self._hidden.values()]
        leased = [stored for stored in residents if stored.num_leases]
        usage = self.usage()
        assert usage.free + usage.held + usage.leased + usage.reserved == usage.capacity
        assert self._space.used == sum(stored.space for stored in residents)
        assert usage.leased == sum(stored.space for stored in leased)
        assert usage.reserved == sum(stored.space for stored in self._reserved.values())
        assert usage.num_leased == sum(stored.stage is Stage.VISIBLE for stored in leased)
        assert all(stored.num_leases for stored in self._hidden.values())
        followed = [o.parent for o in residents if o.stage is not Stage.HIDDEN and o.parent]
        assert self._followers == Counter(followed)

    def validate_rights(
        self, *, leased: Iterable[StoredObject], reserved: Iterable[StoredObject]
    ) -> None:
        """Raises AssertionError unless exactly these leases (one entry each) and reservations are counted."""
        holds = Counter(stored.generation for stored in leased)
        residents = [*self._visible.values(), *self._hidden.values()]
        assert holds == Counter({o.generation: o.num_leases for o in residents if o.num_leases})
        assert {o.generation for o in reserved} == {o.generation for o in self._reserved.values()}
