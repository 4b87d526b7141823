"""One store node in virtual time: the pure state, and around it what the real shell does, with simulated hardware.

Checks the node against what is true of it: `shown` holds what is visible, told by its commits and recoveries.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvstore import eviction
from kvstore.allocator import ALIGNMENT
from kvstore.catalog import Catalog
from kvstore.disk.base import DiskObject, Pin, Place
from kvstore.event_log import EventLog, ToAll
from kvstore.eviction import POLICY_NAMES
from kvstore.incarnation import OBJECTS_BITS
from kvstore.moves import Load, Store
from kvstore.native.layout import RETIRED_AT, SLOT, Fields
from kvstore.native.library import key_index
from kvstore.native.reader import slots_of
from kvstore.promises import Lease, Reservation, Wish
from kvstore.state import StoreState
from kvstore.stored import StoredObject, Watermarks
from protocol.errors import StaleLease
from protocol.keys import BlockKey, pack_keys
from tests.kvstore.hardware import NOTHING, Disk, Memory
from tests.kvstore.shown import Shown
from tests.kvstore.simulated_removals import SimulatedRemovals, forgotten
from tests.kvstore.simulated_time import Time

Reply = Callable[[Any], None]
MEMORY_UNITS, DISK_UNITS, QUOTA_UNITS = 40, 90, 24
RESERVATION_TTL_S, EXPIRE_EVERY_S = 30.0, 0.5
MAX_WRITING = 6


class SimulatedNode:
    """Lives several lives; only its disk outlasts one."""

    def __init__(self, world: Time, name: str) -> None:
        self.name = name
        self.disk = Disk(DISK_UNITS * ALIGNMENT)
        self.life = 0  # also its epoch
        self.is_up = False
        self.stalled_until = 0.0
        self.committed: set[int] = set()  # contents, of all lives
        self._world = world
        self._removed_up_to: dict[BlockKey, int] = {}  # generations
        self.removals = SimulatedRemovals(self, lambda: [n for n in world.nodes if n is not self])
        self.start()

    def start(self) -> None:
        rng = self._world.rng
        self.life, self.is_up = self.life + 1, True
        self._clock_offset = rng.uniform(0, 1e6)  # no node knows another's clock
        self.memory = Memory(MEMORY_UNITS)
        self.index = key_index()
        self.log = EventLog()
        self.shown = Shown(lambda key: self.state.find(key))
        self.state = StoreState(self._catalog())
        self.state.use_disk(self.disk)
        self._has_disk = True
        self._windows: dict[str, Reservation] = {}
        self._commits: dict[str, list[Reply]] = {}
        self._waiting: list[tuple[Lease, Reply]] = []  # for reads
        self._writing: list[Store] = []
        self._unwanted: set[BlockKey] = set()  # removed before they were found
        self._unknown = self.disk.recover()
        rng.shuffle(self._unknown)
        self.removals.start(self._begin_to_recover)
        self.later(EXPIRE_EVERY_S, self._expire)

    def _catalog(self) -> Catalog:
        policy = self._world.rng.choice(POLICY_NAMES)
        return Catalog(
            MEMORY_UNITS * ALIGNMENT,
            index=self.index,
            policies=lambda: eviction.make(policy),
            announce=ToAll([self.log, self.shown]),
            watermarks=Watermarks(evict_above=0.8, evict_share=0.1),
            quotas={"limited": QUOTA_UNITS * ALIGNMENT},
            first_generation=self.life << OBJECTS_BITS,
        )

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """In this life; while the process is stopped nothing happens."""
        life = self.life

        def due() -> None:
            if self.life != life or not self.is_up:
                return
            if self._world.now < self.stalled_until:
                self._world.later(self.stalled_until - self._world.now, due)
            else:
                action()

        self._world.later(delay_s, due)

    def crash(self) -> None:
        """Each write under way is lost, or durable though nobody was told."""
        self.removals.crash()
        self.is_up = False
        for store in self._writing:
            if self._world.rng.random() < 0.5:
                self._put_on_disk(store)

    def lose_disk(self) -> None:
        """It comes back empty at the next start."""
        if self._has_disk:
            self._has_disk = False
            self.shown.asked(self.state.forget_disk)
            self.disk.kept.clear()
            self.removals.lose_folder()

    @property
    def _now(self) -> float:
        return self._world.now + self._clock_offset

    @property
    def now(self) -> float:
        """By its own clock."""
        return self._now

    @property
    def world_now(self) -> float:
        return self._world.now

    @property
    def rng(self) -> random.Random:
        return self._world.rng

    @property
    def is_stalled(self) -> bool:
        return self._world.now < self.stalled_until

    # Calls

    def reserve(self, name: str, wishes: Sequence[Wish], reply: Reply) -> None:
        reservation = self.state.writers.reserve(name, wishes, RESERVATION_TTL_S, self._now)
        if reservation.objects:
            self._windows[name] = reservation
        reply(dict(reservation.objects))
        self.pump()

    def write(self, name: str, key: BlockKey, content: int) -> bool:
        """One-sided; False = the window is closed."""
        reservation = self._windows.get(name)
        stored = reservation.objects.get(key) if reservation is not None else None
        if stored is None or stored.offset is None:
            return False
        self.memory.write(stored.offset, stored.length, content)
        return True

    def commit(self, name: str, checksums: Mapping[BlockKey, int], reply: Reply) -> None:
        if name in self._commits:
            self._commits[name].append(reply)
            return
        corrupt = self.state.writers.commit(name, checksums, self._now)
        if corrupt is not None:
            reply(corrupt)
            return
        self._commits[name] = [reply]
        self.later(self._world.rng.uniform(0, 0.01), lambda: self._finish(name))

    def _finish(self, name: str) -> None:
        del self._windows[name]
        landed = self.state.writers.landed(name)[1]
        good = {o.checksum for o in landed if self._content(o.offset, o.length) == o.checksum}
        corrupt = [item.key for item in landed if item.checksum not in good]
        self.committed |= good
        for content in good:
            self._world.truth.stored(content, self._world.now)
        self.state.writers.verified(name, corrupt, self._now)
        for reply in self._commits.pop(name):
            reply(tuple(corrupt))
        self.pump()

    def abort(self, name: str, reply: Reply) -> None:
        self._reclaim(self.state.writers.abort(name, self._now))
        reply(None)

    def reserve_copy(self, name: str, wishes: Sequence[Wish]) -> dict[BlockKey, StoredObject]:
        """As `kvstore.copying` does, within this process."""
        reservation = self.state.writers.reserve(name, wishes, None, self._now)
        if reservation.objects:
            self._windows[name] = reservation
        return reservation.objects

    def end_copy(self, name: str, good: Mapping[BlockKey, int]) -> None:
        """What was verified while it was read becomes visible."""
        if self._windows.pop(name, None) is None:
            return
        if good:
            self.state.writers.commit(name, good, self._now)
            self.committed |= set(good.values())
            self.state.writers.verified(name, (), self._now)
        else:
            self.state.writers.abort(name, self._now)
            self.state.writers.closed(name, self._now)
        self.pump()

    def _reclaim(self, reservation: Reservation | None) -> None:
        if reservation is None:
            return
        name = reservation.reservation_id

        def close() -> None:
            self._windows.pop(name, None)
            self.state.writers.closed(name, self._now)

        self.later(self._world.rng.uniform(0, 0.1), close)

    def lease(self, name: str, keys: Sequence[BlockKey], ttl_s: float, reply: Reply) -> None:
        lease = self.state.readers.lease(name, keys, ttl_s, self._now)
        self._begin(lease.loads)
        self._waiting.append((lease, reply))
        self._answer_leases()
        self.pump()

    def _answer_leases(self) -> None:
        waiting, self._waiting = self._waiting, []
        for lease, reply in waiting:
            if any(self.state.moves.is_loading(stored) for stored in lease.objects):
                self._waiting.append((lease, reply))
                continue
            try:
                objects = self.state.readers.settle(lease.lease_id).objects if lease.objects else ()
            except StaleLease as error:
                reply(error)
            else:
                reply((self.life, objects))

    def renew(self, name: str, ttl_s: float, reply: Reply) -> None:
        self.state.readers.renew(name, ttl_s, self._now)
        reply(None)

    def release(self, name: str, reply: Reply) -> None:
        self.state.readers.release(name, self._now)
        reply(None)
        self.pump()

    def remove(self, keys: Sequence[BlockKey], reply: Reply) -> None:
        removed = self.shown.asked(lambda: self.state.remove(keys, corrupt=False))
        for found in removed:
            self._removed_up_to[found.key] = found.generation
        if self._unknown:
            self._unwanted.update(keys)
        self.disk.forget(removed)
        reply(len(removed))

    def remove_everywhere(self, keys: Sequence[BlockKey], removal_id: int, reply: Reply) -> None:
        """This node's part of it."""
        fresh = self.removals.execute(keys, removal_id)
        self.drop_before(dict.fromkeys(fresh, self.state.latest_generation + 1))
        reply(None)

    def last_removals(self, keys: Sequence[BlockKey], reply: Reply) -> None:
        reply(self.removals.last(keys))

    def drop_before(self, bounds: dict[BlockKey, int]) -> None:
        """Others have told of removals."""
        self.shown.asked(lambda: self.state.remove_before(bounds))
        for key, bound in bounds.items():
            self._removed_up_to[key] = max(bound - 1, self._removed_up_to.get(key, 0))
        if self._unknown:
            self._unwanted.update(bounds)
        self.disk.forget(forgotten(bounds))

    def pin(self, keys: Sequence[BlockKey], pin: Pin, reply: Reply) -> None:
        reply(self.state.pin(keys, pin))

    def touch(self, keys: Sequence[BlockKey], reply: Reply) -> None:
        self.state.touch(pack_keys(keys))
        reply(None)

    def prefetch(self, keys: Sequence[BlockKey], reply: Reply) -> None:
        self._begin(self.state.readers.prefetch(keys))
        reply(None)

    def look(self, view: tuple[memoryview, Any], key: BlockKey) -> Fields | None:
        """One-sided: the slot of `key` in an index that a client has mapped; None = absent or the index has moved."""
        memory, geometry = view
        at, length = slots_of(geometry, key, geometry.num_all)
        found = None
        for fields in SLOT.iter_unpack(memory[at : at + length]):
            if not fields[2] or fields[0] == key:
                found = fields if fields[2] else None
                break
        return None if memory[RETIRED_AT] else found

    # Moves

    def pump(self) -> None:
        while self._has_disk and len(self._writing) < MAX_WRITING:
            stores = self.state.moves.demotions(2 * ALIGNMENT) or self._copies()
            if not stores:
                return
            for store in stores:
                self._writing.append(store)
                self.later(self._world.rng.expovariate(50), lambda s=store: self._written(s))  # type: ignore[misc]

    def _copies(self) -> list[Store]:
        """Now and then something is copied ahead of need."""
        rng = self._world.rng
        if rng.random() > 0.1 or not self.shown.expected:
            return []
        stored = self.state.find(rng.choice(list(self.shown.expected)))
        return [] if stored is None else self.state.moves.copies(2**30, [stored])

    def _written(self, store: Store) -> None:
        self._writing.remove(store)
        good = self._has_disk and self._world.rng.random() < 0.98
        self.state.moves.stored(store, self._put_on_disk(store) if good else None)
        if good:
            self.pump()

    def _put_on_disk(self, store: Store) -> Place:
        header, offset = store.object.header(), store.object.offset
        assert offset is not None
        assert self._content(offset, header.length) == header.checksum, "changed while written"
        place = self.disk.write(header)
        if header.generation <= self._removed_up_to.get(header.key, 0):
            self.disk.forget([header])
        return place

    def _begin(self, loads: Sequence[Load]) -> None:
        for load in loads:
            self.memory.write(load.offset, load.object.length, NOTHING)
            self.later(self._world.rng.expovariate(50), lambda one=load: self._read(one))  # type: ignore[misc]

    def _read(self, load: Load) -> None:
        good = self._has_disk and self._world.rng.random() < 0.99
        if good:
            self.memory.write(load.offset, load.object.length, load.object.checksum)
        self.shown.asked(lambda: self.state.loaded(load, good))
        self._answer_leases()
        self.pump()

    def relocate_some(self) -> None:
        """The disk reclaims a segment."""
        self.disk.compact()
        unknown = {place for _, place in self._unknown}
        for old in sorted(self.disk.live - unknown)[:3] if self._has_disk else ():
            moved, new = self.disk.kept[old], self.disk.move(old)
            wanted = self.state.moves.relocated(moved.key, moved.generation, old, new)
            self.disk.moved(old, new, wanted=wanted)

    def _begin_to_recover(self, may_stay: bool) -> None:
        if not may_stay:
            self._unwanted.update(found.key for found, _ in self._unknown)
        self._recover()

    def _recover(self) -> None:
        for found, place in self._unknown[:8]:
            kept = found.key not in self._unwanted and self._restore(found, place)
            if found.key in self._unwanted:
                self.disk.forget([found])
            if not kept:
                self.disk.release(place)
        del self._unknown[:8]
        if self._unknown:
            self.later(self._world.rng.uniform(0, 0.05), self._recover)

    def _restore(self, found: DiskObject, place: Place) -> bool:
        assert found.generation > self._removed_up_to.get(found.key, 0), "a removed object is back"
        return bool(self.shown.asked(lambda: self.state.restore(found, place)))

    def _expire(self) -> None:
        for reservation in self.state.expire(self._now):
            self._reclaim(reservation)
        self.later(EXPIRE_EVERY_S, self._expire)

    # Truth

    def _content(self, offset: int, length: int) -> int:
        return self.memory.read(offset, length)

    def check(self) -> None:
        """Raises AssertionError unless the node is in order, and holds what it should and nothing else."""
        self.state.validate()
        visible = list(self.state.objects())
        assert {o.key: o.checksum for o in visible} == self.shown.expected
        assert self.shown.num_evicted == self.state.counters["evictions_succeeded"]
        for stored in visible:
            self._check_object(stored)
        places = {o.place for o in visible if o.place is not None}
        assert self.disk.live == places | {place for _, place in self._unknown}

    def _check_object(self, stored: StoredObject) -> None:
        assert stored.generation > self._removed_up_to.get(stored.key, 0)
        if stored.offset is not None:
            assert self._content(stored.offset, stored.length) == stored.checksum
        if stored.place is not None:
            assert self.disk.kept[stored.place].generation == stored.generation

    def inventory(self) -> Iterator[StoredObject]:
        return self.state.objects()
