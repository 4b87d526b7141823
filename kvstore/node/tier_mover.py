"""Moves a node's objects between its segment and its disk.

The only caller of the disk. It decides nothing: `kvstore.state.tiering` chooses the objects. Writes are split into
pieces that keep the disk busy without holding back more memory than it writes in a moment.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from moonserve.kvstore.disk.base import DiskObject, DiskRead, DiskTier, DiskUsage, DiskWrite, Health, Place
from moonserve.kvstore.state.objects import DiskReadMove, DiskWriteMove, Lease
from moonserve.kvstore.state.state import StoreState
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.process.event_loop import BackgroundTasks, wait_event

log = logging.getLogger(__name__)

# Enough to keep several threads writing; more would hold back memory that readers need.
PIECE_BYTES = 8 * 2**20
MAX_WRITING_BYTES = 64 * 2**20
# A full disk may gain space by compaction or by eviction, so writes are retried only after this time.
REFUSED_PAUSE_S = 0.2


class Validity(Protocol):
    """Decides which objects found on disk are still valid after the time the node was away."""

    async def wait_until_decided(self) -> bool:
        """Waits until it is decided if the disk's objects may be used. Returns False if none may."""

    async def outdated_keys(self, found: Sequence[DiskObject]) -> set[BlockKey]:
        """Returns the keys of the objects that were removed or replaced meanwhile."""


class TierMover:
    """Carries out the moves of one node. Belongs to its event loop. `changed` is called when a move has ended."""

    def __init__(
        self,
        state: StoreState,
        memory: memoryview,
        changed: Callable[[], None],
        *,
        write_through: bool = False,
    ) -> None:
        self.disk: DiskTier | None = None
        self.recovered = 1.0  # share of the disk whose objects are known
        self.health = Health.GOOD
        """Health of the disk as this node uses it. A disk that recovers is not used before the next start, since its
        contents have been forgotten here."""
        self._state = state
        self._memory = memory
        self._changed = changed
        self._write_through = write_through
        self._fresh: deque[BlockKey] = deque()  # to be copied to disk
        self._unwanted: set[BlockKey] = set()  # removed before recovery found them
        self._all_found = asyncio.Event()
        self._all_found.set()
        self._writing_bytes = 0
        self._resting: asyncio.TimerHandle | None = None  # set while writes pause
        self._loading: dict[int, asyncio.Future[None]] = {}  # by generation
        self._tasks = BackgroundTasks()
        self._moved = asyncio.Event()  # replaced at each end
        self._disk_lost = asyncio.Event()

    def set_disk(self, disk: DiskTier) -> None:
        """Sets the disk, whose contents `recover` is going to take in."""
        self.disk, self.recovered = disk, 0.0
        self._all_found.clear()

    async def recover(
        self,
        disk: DiskTier,
        progress: Callable[[float], None],
        validity: Validity | None = None,
    ) -> None:
        """Takes in the disk's contents while the node already serves. Nothing is written to the disk meanwhile.

        `validity` decides which objects were removed or replaced while the node was away; None = none were.
        """

        def tell(share: float) -> None:
            self.recovered = min(share, 0.999)
            progress(share)

        self.recovered = 0.0
        self._all_found.clear()
        unwanted: list[DiskObject] = []
        num_found = 0
        try:
            may_stay = validity is None or await validity.wait_until_decided()
            async for batch in disk.recover(tell):
                num_found += len(batch)
                found = [about for about, _ in batch]
                if not may_stay:
                    self._unwanted.update(about.key for about in found)
                elif validity is not None:
                    self._unwanted |= await validity.outdated_keys(found)
                unwanted += self._restore_batch(disk, batch)
                await asyncio.sleep(0)
            await disk.forget(unwanted)
            self.recovered = 1.0
        finally:
            self._unwanted.clear()
            self._all_found.set()
        self._changed()
        log.info("%d objects found on disk; %d are here now", num_found, len(self._state.catalog))

    def _restore_batch(self, disk: DiskTier, batch: Sequence[tuple[DiskObject, Place]]) -> list[DiskObject]:
        """Restores a batch of objects found on disk. Returns the objects that were removed before they were found."""
        unwanted = [found for found, _ in batch if found.key in self._unwanted]
        # An earlier value of the same key that was found before is forgotten with it, so it may not stay in sight.
        self._state.remove_before({found.key: found.generation + 1 for found in unwanted})
        for found, place in batch:
            if found.key in self._unwanted or not self._state.restore(found, place):
                disk.release(place)
        return unwanted

    def health_changed(self, health: Health, reason: str) -> None:
        """Stops using a disk that is not good until the next start (`kvstore.disk.base.HealthChanged`)."""
        if health is Health.GOOD:
            log.info("the disk works again; this node uses it after its next start")
            return
        self.health = health
        log.error("the disk is %s: %s; serving from memory only", health, reason)
        self._state.forget_disk()
        for loaded in self._loading.values():  # the disk may never answer
            _set_done(loaded)
        self._disk_lost.set()
        self._changed()

    @property
    def usable(self) -> bool:
        """True if objects can be written to disk."""
        return self.disk is not None and self.health is Health.GOOD and self.recovered == 1

    def disk_state(self) -> tuple[Health, DiskUsage, Mapping[str, int]] | None:
        """Returns the disk's health, usage and counters for metrics; None without a disk."""
        disk = self.disk
        return None if disk is None else (self.health, disk.usage(), dict(disk.counters))

    def start_due_writes(self) -> None:
        """Starts the writes that are due: demotions of the coldest objects, then copies of new objects."""
        if not self.usable or self._resting is not None:
            return
        while (budget := MAX_WRITING_BYTES - self._writing_bytes) > 0:
            stores = self._state.tier_moves.demotions(min(budget, PIECE_BYTES)) or self._copies()
            if not stores:
                return
            self._writing_bytes += sum(store.object.length for store in stores)
            self._tasks.start(self._write(stores))

    def enqueue_copies(self, keys: Iterable[BlockKey]) -> None:
        """Queues new objects to be copied to disk if write-through is on."""
        if self._write_through and self.disk is not None and self.health is Health.GOOD:
            self._fresh.extend(keys)  # during recovery they wait until it has ended

    async def flush(self, timeout_s: float) -> int:
        """Copies objects that are only in memory to disk, for at most `timeout_s`. Returns how many are still missing
        there; 0 without a disk."""
        if self.disk is None:
            return 0
        if not self.usable:
            return self._state.num_not_on_disk
        self._fresh.extend(o.key for o in self._state.catalog.objects() if o.place is None)
        self._write_through = True
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        self.start_due_writes()
        moves = self._state.tier_moves
        while (self._fresh or moves.num_writes) and loop.time() < ends_at and self.usable:
            await wait_event(self._moved, ends_at - loop.time())
        return self._state.num_not_on_disk

    def start_reads(self, loads: Iterable[DiskReadMove]) -> None:
        """Starts these reads, in pieces."""
        piece: list[DiskReadMove] = []
        for load in loads:
            self._loading[load.object.generation] = asyncio.get_running_loop().create_future()
            piece.append(load)
            if sum(one.object.length for one in piece) >= PIECE_BYTES:
                self._tasks.start(self._read(piece))
                piece = []
        if piece:
            self._tasks.start(self._read(piece))

    async def wait_for_reads(self, lease: Lease) -> None:
        """Waits for the reads of this lease's objects, whichever call started them."""
        waiting = [self._loading.get(stored.generation) for stored in lease.objects]
        for future in waiting:
            if future is not None:
                await asyncio.shield(future)

    async def wait_for_memory(self, nbytes: int, timeout_s: float) -> None:
        """Waits until `nbytes` of memory are free or no demotions are in flight, for at most `timeout_s`."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        self.start_due_writes()
        while self._state.should_wait_for_memory(nbytes) and (left_s := ends_at - loop.time()) > 0:
            await wait_event(self._moved, left_s)

    async def forget(self, generations: Mapping[BlockKey, int]) -> bool:
        """Makes the disk forget these keys up to these generations, so that they do not return after a restart.

        Returns False if the disk takes no writes; it catches up if it recovers before this process ends. Keys that are
        absent here count too: an object evicted from the disk stays there until its segment is reclaimed.
        """
        self.drop_in_recovery(generations)
        await self._all_found.wait()
        if self.disk is None or not generations:
            return True
        gone = generations.items()
        return await self.disk.forget(
            [DiskObject(key=key, parent=None, length=0, checksum=0, generation=upto) for key, upto in gone]
        )

    def drop_in_recovery(self, keys: Iterable[BlockKey]) -> None:
        """Makes a running recovery drop these keys. Call it in the same turn of the loop as the removal: a batch taken
        in between would bring the object back."""
        if not self._all_found.is_set():
            self._unwanted.update(keys)

    async def save_pins(self, keys: Iterable[BlockKey]) -> None:
        """Writes the current pins of these objects to disk, for objects with a disk copy."""
        await self._all_found.wait()
        found = [stored for key in keys if (stored := self._state.catalog.find(key)) is not None]
        changes = [
            replace(stored.header(), generation=self._state.catalog.take_generation())
            for stored in found
            if stored.place is not None
        ]
        if self.usable and changes:
            assert self.disk is not None
            await self.disk.repin(changes)

    async def close(self) -> None:
        """Waits for moves in flight, but not for a lost disk, and closes the disk."""
        if self._resting is not None:
            self._resting.cancel()
        lost = asyncio.create_task(self._disk_lost.wait())
        while self._tasks and not lost.done():
            await asyncio.wait({*self._tasks, lost}, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if self.disk is not None:
            await self.disk.close()
        await asyncio.gather(*self._tasks)

    def _copies(self) -> list[DiskWriteMove]:
        while self._fresh:
            stored = self._state.catalog.find(self._fresh.popleft())
            if stored is not None and (store := self._state.tier_moves.copy(stored)) is not None:
                return [store]
        return []

    async def _write(self, stores: Sequence[DiskWriteMove]) -> None:
        assert self.disk is not None
        try:
            places = await self.disk.write(
                [DiskWrite(object=s.object.header(), memory=s.object.bytes_in(self._memory)) for s in stores]
            )
        finally:
            self._writing_bytes -= sum(store.object.length for store in stores)
        for store, place in zip(stores, places, strict=True):
            self._state.tier_moves.write_ended(store, place)
        await self._save_late_pins(stores)
        if None in places:
            self._pause_writes()
        self.start_due_writes()
        self._ended()

    async def _save_late_pins(self, stores: Sequence[DiskWriteMove]) -> None:
        """Writes the pins that changed while their objects were being written."""
        written = {store.object.key: store.object.pin for store in stores}
        pins = zip(written, self._state.pins(list(written)), strict=True)
        if late := [key for key, pin in pins if pin is not written[key]]:
            await self.save_pins(late)

    def _pause_writes(self) -> None:
        """Pauses writes for REFUSED_PAUSE_S after the disk refused some, instead of retrying in a busy loop."""
        if self._resting is None:
            loop = asyncio.get_running_loop()
            self._resting = loop.call_later(REFUSED_PAUSE_S, self._resume_writes)

    def _resume_writes(self) -> None:
        self._resting = None
        self.start_due_writes()
        self._ended()  # wakes waiters even if there is nothing left to write

    async def _read(self, loads: Sequence[DiskReadMove]) -> None:
        assert self.disk is not None
        good = await self.disk.read(
            [
                DiskRead(object=o.header(), place=o.place, memory=self._memory[load.offset : load.offset + o.length])
                for load in loads
                if (o := load.object).place is not None
            ]
        )
        for load, arrived in zip(loads, good, strict=True):
            self._state.tier_moves.read_ended(load, arrived)
            _set_done(self._loading.pop(load.object.generation))
        self._ended()

    def _ended(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
        self._changed()


def _set_done(loaded: asyncio.Future[None]) -> None:
    if not loaded.done():
        loaded.set_result(None)
