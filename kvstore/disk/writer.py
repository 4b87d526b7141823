"""Group commit: what is written at the same time goes to the disk in few large writes and one fdatasync.

While one group is made durable the next one is written; then it waits for the former, so that a log is whole up to any
acknowledged object. After a failed group its segment takes nothing more, and what follows it there fails with it; what
was in it must not be found after a restart, so tombstones are owed for it. What compaction writes goes before what the
node writes, and into the segment kept for it, since space comes from there.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from kvstore.disk.base import PAGE, DiskObject, DiskWrite, Place
from kvstore.disk.format import MAX_TENANT_BYTES, Tombstone, place_of, record_bytes
from kvstore.disk.group import Call, Group, Item, object_items, runs, tombstone_items
from kvstore.disk.health import Doing
from kvstore.disk.object_io import EndEntry, ObjectIo
from kvstore.disk.segments import Segments

logger = logging.getLogger(__name__)

_GROUP_BYTES = 32 * 2**20
_GROUPS_UNDER_WAY = 2
"""One that is made durable, one that is written."""


class Writer:
    """The only one who appends to the log. Belongs to one event loop."""

    def __init__(self, segments: Segments, io: ObjectIo) -> None:
        self._segments = segments
        self._log = segments.log
        self._io = io
        self._urgent: deque[Item] = deque()
        self._waiting: deque[Item] = deque()
        self._group: list[Item] = []
        self._under_way: list[Group] = []
        self._owed: list[Tombstone] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.room_is_coming: Callable[[], bool] = lambda: False
        """Whether it is worth waiting for a segment; asked when there is none."""

    async def write(self, writes: Sequence[DiskWrite], *, source: int = 0) -> list[Place | None]:
        """Durable on return; None where there is no space or the disk failed. `source` is the segment that compaction
        copies from."""
        if not writes:
            return []
        call = Call(len(writes))
        (self._urgent if source else self._waiting).extend(object_items(writes, call, source))
        try:
            return await self._answer(call)
        except asyncio.CancelledError:
            self._abandon(writes, call.places)
            raise
        finally:
            call.heard()
            self._changed.set()

    async def forget(self, tombstones: Sequence[Tombstone], *, urgent: bool = False) -> bool:
        """Durable on return, unless it is False: then they are owed, and written as soon as the disk lets it."""
        if not tombstones:
            return True
        items = tombstone_items(tombstones)
        (self._urgent if urgent else self._waiting).extend(items)
        return None not in await self._answer(items[0].call)

    def owe(self, objects: Sequence[DiskObject]) -> None:
        """They must not be found after a restart; the next writes say so."""
        self._owed += [Tombstone(each.key, each.generation) for each in objects]

    async def settle_debts(self, *, urgent: bool = False) -> bool:
        """Writes what is owed, if the disk lets it; whether nothing is any more."""
        owed, self._owed = self._owed, []
        return await self.forget(owed, urgent=urgent)

    def room_changed(self) -> None:
        """A segment became free, or will not."""
        self._changed.set()

    async def close(self) -> None:
        """Whoever waits for space does not get it. The segment in use is sealed."""
        while self._task is not None:
            self.room_changed()
            await asyncio.wait([self._task])
        await self.settle_debts()
        await self._segments.seal()

    async def _answer(self, call: Call) -> list[Place | None]:
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._drain())
        return await call.answer.wait()

    def _abandon(self, writes: Sequence[DiskWrite], places: Sequence[Place | None]) -> None:
        """Nobody will hear where they are."""
        for write, place in zip(writes, places, strict=True):
            if place is not None:
                self._log.release(place)
                self.owe([write.object])

    async def _drain(self) -> None:
        try:
            self._pay()
            while self._urgent or self._waiting or self._under_way:
                self._changed.clear()
                if not (self._urgent or self._waiting) or self._is_busy():
                    await self._changed.wait()
                    continue
                self._group = []
                await self._gather()
                if self._group:
                    await self._begin(self._group)
        except Exception:  # whoever waits for a write must be told
            logger.exception("writes to the SSD tier are refused: this is a bug")
            self._refuse_unanswered([*self._group, *self._urgent, *self._waiting])
            self._urgent.clear()
            self._waiting.clear()
        finally:
            self._task = None

    def _is_busy(self) -> bool:
        return len(self._under_way) == _GROUPS_UNDER_WAY

    def _pay(self) -> None:
        """What is owed goes with the next group; nobody waits for it."""
        if self._owed:
            items = tombstone_items(self._owed)
            self._owed = []
            self._waiting.extendleft(items)

    async def _gather(self) -> None:
        """The next group: what fits into the active segment, of what waits."""
        nbytes = 0
        while nbytes < _GROUP_BYTES and (queue := self._urgent or self._waiting):
            item, urgent = queue[0], queue is self._urgent
            if self._log.may_append(urgent=urgent) and self._fits(item):
                queue.popleft()
                self._place(item)
                nbytes += item.num_pages * PAGE
            elif self._group:
                return
            elif not self._possible(item) or not await self._make_room(urgent):
                queue.popleft()
                self._refuse(item)

    def _place(self, item: Item) -> None:
        assert self._log.active is not None
        if item.write is not None:
            item.call.wrote_to(self._log.active)
        self._log.active.promise(*item.footer_bytes)
        item.placed(self._log.append(item.num_pages, live=item.write is not None))
        self._group.append(item)

    def _fits(self, item: Item) -> bool:
        active = self._log.active
        return (
            active is not None
            and self._possible(item)
            and active.fits(item.num_pages, *item.footer_bytes)
        )

    def _possible(self, item: Item) -> bool:
        if not self._segments.may_write():
            return False
        if item.write is None:
            return True
        about = item.write.object
        return (
            len(item.write.memory) == about.length
            and len(about.tenant.encode()) <= MAX_TENANT_BYTES
            and self._log.fits_at_all(item.num_pages, record_bytes(about))
        )

    async def _make_room(self, urgent: bool) -> bool:
        """Whether it is worth looking again: in another segment, or since something has changed."""
        if self._log.may_open(urgent=urgent):
            while self._under_way:  # the footer says what has become of them
                await self._settled(self._under_way[0])
            await self._segments.seal()
            return await self._segments.begin()
        if urgent or not self.room_is_coming():
            return False
        self._changed.clear()
        await self._changed.wait()
        return True

    async def _begin(self, items: Sequence[Item]) -> None:
        """Returns when the next group may be written."""
        active = self._log.active
        assert active is not None
        former = self._under_way[-1] if self._under_way else None
        group = Group(items, active, active.tail)
        self._under_way.append(group)
        group.over = asyncio.create_task(self._commit(group, former))
        await group.written.wait()

    async def _commit(self, group: Group, former: Group | None) -> None:
        try:
            error = await self._write_group(group)
            if former is not None:
                await self._settled(former)
                if former.failed and former.segment is group.segment:
                    error = error or OSError(errno.EIO, "what lies before it was not written")
            if error is None:
                self._succeeded(group)
            else:
                await self._failed(group, error)
        except Exception:  # whoever waits for a write must be told
            logger.exception("a group of writes to the SSD tier is refused: this is a bug")
            self._refuse_unanswered(group.items)
        finally:
            self._under_way.remove(group)
            group.written.set()
            self._changed.set()

    async def _write_group(self, group: Group) -> OSError | None:
        file = self._segments.files[group.segment.number]
        entries = [*(item.entry for item in group.items), EndEntry(group.end)]
        threads = self._segments.threads
        jobs = [partial(self._io.write, file, run) for run in runs(entries, threads.num_threads)]
        in_use = ExitStack()  # if the disk hangs, until it has really let go of it
        in_use.enter_context(file)
        outcomes = await threads.run(
            jobs, then=file.sync, between=group.written.set, over=in_use.close
        )
        return next((outcome for outcome in outcomes if outcome is not None), None)

    async def _settled(self, group: Group) -> None:
        """Waits until its items are answered."""
        if group.over is not None:
            await asyncio.wait([group.over])

    def _succeeded(self, group: Group) -> None:
        segment, counters = group.segment, self._segments.counters
        segment.written = group.end
        for item in group.items:
            if item.write is not None:
                segment.keep_record(item.encoded)
                counters["objects_written"] += 1
                counters["bytes_written"] += item.write.object.length
            else:
                until = max(each.segment for each in item.tombstones)
                segment.keep_tombstones(item.encoded, until)
            item.settle(place_of(segment.number, item.page))

    async def _failed(self, group: Group, error: OSError) -> None:
        """Nobody knows what of it is on disk: nothing may follow it, and it may not come back."""
        group.failed = True
        self._segments.failed(Doing.WRITE, error)
        for item in group.items:
            if item.write is not None:
                self._log.release(place_of(group.segment.number, item.page))
                self.owe([item.write.object])
        if self._log.active is group.segment:
            await self._segments.seal()
        for item in group.items:
            self._refuse(item)

    def _refuse_unanswered(self, items: Sequence[Item]) -> None:
        for item in items:
            if not item.call.answer.is_given:
                self._refuse(item)

    def _refuse(self, item: Item) -> None:
        self._owed += item.tombstones
        item.settle(None)
