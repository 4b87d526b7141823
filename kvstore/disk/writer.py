"""Group commit: appends concurrent writes to the log in few large operations, with several groups in flight.

A write is answered once the log is whole up to it: groups are answered in log order. After a failed group, its segment
takes no more writes, and later groups in it fail too. Its objects must not be found after a restart, so tombstones are
owed for them. Removals are answered once durable, objects as `Flusher` decides. Compaction's writes precede the node's
and may use the segment kept for them, because they free space.
"""

import asyncio
import errno
import logging
from collections import deque
from collections.abc import Callable, Sequence

from moonserve.kvstore.disk.base import PAGE, DiskObject, DiskWrite, Place
from moonserve.kvstore.disk.health import DiskOperation
from moonserve.kvstore.disk.io.format import MAX_RECORD_BYTES, Tombstone, place_of, segment_of
from moonserve.kvstore.disk.io.object_io import ObjectIo
from moonserve.kvstore.disk.io.uring import Ring
from moonserve.kvstore.disk.log_state import Segment
from moonserve.kvstore.disk.segment_lifecycle import Flusher, OpenSegments
from moonserve.kvstore.disk.write_group import (
    GroupWriter,
    LogItem,
    WriteCall,
    WriteGroup,
    object_items,
    tombstone_items,
)
from moonserve.protocol.process.event_loop import BackgroundTasks

logger = logging.getLogger(__name__)

_GROUP_BYTES = 4 * 2**20
_SMALL_CALL_BYTES = 256 * 2**10
"""While the disk is busy, calls of fewer bytes wait for others: a group costs as much time as four blocks of 64 KiB."""
_MAX_GROUPS_IN_FLIGHT = 4
"""Keeps the disk busy while answers to one group lead to the next one."""


class Writer:
    """The only writer of the log. Belongs to one event loop."""

    def __init__(self, segments: OpenSegments, flusher: Flusher, io: ObjectIo, ring: Ring | None) -> None:
        self._segments = segments
        self._log = segments.log
        self._flusher = flusher
        flusher.on_failure = self._flush_failed
        self._carrier = GroupWriter(segments, io, ring, self._group_written)
        self._urgent: deque[LogItem] = deque()
        self._waiting: deque[LogItem] = deque()
        self._under_way: deque[WriteGroup] = deque()
        self._owed: list[Tombstone] = []
        self._changed = asyncio.Event()
        self._is_due = False
        """True if a pump is scheduled in the event loop."""
        self._making_room: asyncio.Task[None] | None = None
        self._hardening = BackgroundTasks()
        self.space_is_coming: Callable[[], bool] = lambda: False
        """Returns True if waiting for a free segment is worthwhile; called when there is none."""

    async def write(self, writes: Sequence[DiskWrite], *, source: int = 0) -> list[Place | None]:
        """Writes objects and returns their places: on disk on return, or None if there is no space or the disk failed.
        `source` is the segment that compaction copies from."""
        if not writes:
            return []
        call = WriteCall(len(writes))
        (self._urgent if source else self._waiting).extend(object_items(writes, call, source))
        if self._under_way and sum([write.object.length for write in writes]) < _SMALL_CALL_BYTES:
            self._pump_with_others()
        else:
            self._pump()
        try:
            return await call.answer.wait()
        except asyncio.CancelledError:
            self._abandon(writes, call.places)
            raise
        finally:
            call.release_segments()
            self._changed.set()

    async def forget(self, tombstones: Sequence[Tombstone], *, urgent: bool = False) -> bool:
        """Writes tombstones. Returns True once they are durable; on False, they are owed and written when possible."""
        if not tombstones:
            return True
        items = tombstone_items(tombstones)
        (self._urgent if urgent else self._waiting).extend(items)
        self._pump()
        return None not in await items[0].call.answer.wait()

    async def write_queued_tombstones(self) -> None:
        """Writes owed tombstones, if the disk allows it."""
        owed, self._owed = self._owed, []
        await self.forget(owed)

    def space_changed(self) -> None:
        """Notes that a segment became free, or will not."""
        self._changed.set()

    async def close(self) -> None:
        """Refuses writes that wait for space, and seals the active segment, which makes it durable."""
        while self._making_room is not None:
            self.space_changed()
            await asyncio.wait([self._making_room])
        await self.write_queued_tombstones()
        self._segments.seal(self._landed_in)
        while await self._segments.wait_for_footer():
            pass
        await asyncio.gather(*self._hardening)

    def _abandon(self, writes: Sequence[DiskWrite], places: Sequence[Place | None]) -> None:
        """Releases objects of a cancelled write, since no caller learns their places."""
        for write, place in zip(writes, places, strict=True):
            if place is not None:
                self._log.release(place)
                self._queue_tombstone(write.object, segment_of(place))

    def _pump_with_others(self) -> None:
        """Pumps once the event loop has run: writes of callers that were answered together then make one group."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Starts all groups that may start. The rest is retried when a group has landed or there is room."""
        self._is_due = False
        self._changed.set()
        if self._making_room is not None:
            return
        group: list[LogItem] = []
        try:
            if self._owed:
                self._append_queued_tombstones()
            while (self._urgent or self._waiting) and len(self._under_way) < _MAX_GROUPS_IN_FLIGHT:
                group = self._gather()
                if group:
                    self._begin(group)
                elif self._urgent or self._waiting:
                    self._making_room = asyncio.create_task(self._make_room())
                    return
        except Exception:  # callers wait for the result
            logger.exception("writes to the SSD tier are refused: this is a bug")
            self._refuse_all(group)

    def _queue_tombstone(self, about: DiskObject, segment: int) -> None:
        """Owes a tombstone that forbids the object in that segment; it may be written to a later one."""
        self._owed.append(Tombstone(about.key, about.generation, segment))

    def _append_queued_tombstones(self) -> None:
        """Adds owed tombstones to the next group; no caller waits for them."""
        if self._urgent or self._waiting:
            items = tombstone_items(self._owed)
            self._owed = []
            self._waiting.extendleft(items)

    def _gather(self) -> list[LogItem]:
        """Returns the next group: waiting items that fit into the active segment. Impossible items are refused."""
        group: list[LogItem] = []
        nbytes = 0
        may_write = self._segments.may_write()
        may_append = self._log.may_append(urgent=False)
        # The end mark before the next item may be overwritten only once it is on disk.
        skipped = int(bool(self._under_way) and self._under_way[-1].segment is self._log.active)
        while nbytes < _GROUP_BYTES and (queue := self._urgent or self._waiting):
            item = queue[0]
            if not (may_write and self._is_valid(item)):
                self._refuse(queue.popleft())
                continue
            if not (may_append or queue is self._urgent) or not self._place(item, skipped):
                if self._log.fits_at_all(item.num_pages, item.footer_bytes[0]):
                    break
                self._refuse(queue.popleft())
                continue
            queue.popleft()
            skipped = 0
            group.append(item)
            nbytes += item.num_pages * PAGE
        if group and self._log.is_nearly_full:
            self._segments.prepare()
        return group

    def _place(self, item: LogItem, skipped: int) -> bool:
        """Appends an item to the active segment. Returns False if it does not fit."""
        active = self._log.active
        if active is None:
            return False
        live = item.write is not None
        page = active.append(item.num_pages, item.footer_bytes, live=live, skipped=skipped)
        if not page:
            return False
        if live:
            item.call.hold_segment(active)
        item.set_place(active.number, page)
        return True

    def _is_valid(self, item: LogItem) -> bool:
        write = item.write
        if write is None:
            return True
        return len(write.memory) == write.object.length and item.footer_bytes[0] <= MAX_RECORD_BYTES

    async def _make_room(self) -> None:
        """Makes room for the first waiting item, or refuses it if there is none."""
        try:
            queue = self._urgent or self._waiting
            if not await self._has_room(urgent=queue is self._urgent) and queue:
                self._refuse(queue.popleft())
        except Exception:  # callers wait for the result
            logger.exception("writes to the SSD tier are refused: this is a bug")
            self._refuse_all([])
        finally:
            self._making_room = None
            self._pump()

    async def _has_room(self, *, urgent: bool) -> bool:
        """True if the item should be tried again: in another segment, or because something changed."""
        if self._log.may_open(urgent=urgent):
            self._segments.seal(self._landed_in)
            return await self._segments.begin()
        if urgent:
            return False
        if await self._segments.wait_for_footer():
            return True
        self._changed.clear()
        if not self.space_is_coming():
            return False
        await self._changed.wait()
        return True

    async def _landed_in(self, segment: Segment) -> None:
        while any(group.segment is segment for group in self._under_way):
            self._changed.clear()
            await self._changed.wait()

    def _begin(self, items: Sequence[LogItem]) -> None:
        active = self._log.active
        assert active is not None
        group = WriteGroup(items, active, items[0].entry.page, active.tail)
        self._carrier.begin(group)
        self._under_way.append(group)

    def _group_written(self, group: WriteGroup) -> None:
        """Settles landed groups in log order."""
        group.is_written = True
        try:
            while self._under_way and self._under_way[0].is_written:
                self._settle(self._under_way.popleft())
        except Exception:  # callers wait for the result
            logger.exception("a group of writes to the SSD tier is refused: this is a bug")
            self._refuse_all(group.items)
        self._pump()

    def _settle(self, group: WriteGroup) -> None:
        if group.error is None and group.segment.is_broken:
            group.error = OSError(errno.EIO, "what lies before it was not written")
        if group.error is not None:
            self._failed(group, group.items, group.error)
            return
        group.segment.written = group.end
        self._flusher.note_written(group.segment)
        lasting: list[LogItem] = []
        for item in group.items:  # in log order
            if item.write is not None:
                group.segment.keep_record(item.entry.encoded)
            else:
                lasting.append(item)
                group.segment.keep_tombstones(item.entry.encoded, max(each.segment for each in item.tombstones))
        if self._flusher.flushes_each_write:
            self._hardening.start(self._answer_once_durable(group, group.items))
            return
        self._succeeded(group, [item for item in group.items if item.write is not None])
        if lasting:
            self._hardening.start(self._answer_once_durable(group, lasting))

    async def _answer_once_durable(self, group: WriteGroup, items: Sequence[LogItem]) -> None:
        """Answers items once they are durable."""
        try:
            if await self._flusher.flush() and not group.segment.is_broken:
                self._succeeded(group, items)
            else:
                self._failed(group, items, None)
        except Exception:  # callers wait for the result
            logger.exception("a group of writes to the SSD tier is refused: this is a bug")
            self._refuse_all(items)

    def _succeeded(self, group: WriteGroup, items: Sequence[LogItem]) -> None:
        lengths = [item.write.object.length for item in items if item.write is not None]
        counters = self._segments.counters
        counters["objects_written"] += len(lengths)
        counters["bytes_written"] += sum(lengths)
        number = group.segment.number
        for item in items:
            item.call.settle(item.index, place_of(number, item.entry.page))

    def _failed(self, group: WriteGroup, items: Sequence[LogItem], error: OSError | None) -> None:
        """Fails items that may be partly on disk. Nothing may follow them there, and they must not come back."""
        if error is not None:
            self._segments.report_error(DiskOperation.WRITE, error)
        self._give_up(group.segment)
        for item in items:
            if item.write is not None:
                self._log.release(place_of(group.segment.number, item.entry.page))
                if not item.source:  # a copy's source still counts
                    self._queue_tombstone(item.write.object, group.segment.number)
        for item in items:
            self._refuse(item)

    def _flush_failed(self, numbers: set[int]) -> None:
        """Closes the active segment to appends after a failed flush. It stays readable."""
        if self._log.active is not None and self._log.active.number in numbers:
            self._give_up(self._log.active)

    def _give_up(self, segment: Segment) -> None:
        segment.is_broken = True
        if self._log.active is segment:
            self._segments.seal(self._landed_in)

    def _refuse_all(self, items: Sequence[LogItem]) -> None:
        for item in [*items, *self._urgent, *self._waiting]:
            if not item.call.answer.is_set:
                self._refuse(item)
        self._urgent.clear()
        self._waiting.clear()

    def _refuse(self, item: LogItem) -> None:
        self._owed += item.tombstones
        item.call.settle(item.index, None)
