"""Groups of items for group commit, and their transport to the disk through the ring or by threads.

A group is pure except for the futures of its callers. `GroupWriter` belongs to one event loop, and knows neither what
happens after a group nor what is durable.
"""

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from moonserve.kvstore.disk.base import PAGE, DiskWrite, Place
from moonserve.kvstore.disk.health import DiskOperation
from moonserve.kvstore.disk.io.buffers import OutOfPages, RingPages
from moonserve.kvstore.disk.io.format import (
    TOMBSTONE_BYTES,
    TOMBSTONES_PER_PAGE,
    PageKind,
    Tombstone,
    encode_record,
    extent_pages,
    pack_tombstones,
    record_bytes,
)
from moonserve.kvstore.disk.io.object_io import LogEntry, ObjectIo
from moonserve.kvstore.disk.io.segment_file import SegmentFile
from moonserve.kvstore.disk.io.threads import OwnedResult
from moonserve.kvstore.disk.io.uring import Flight, IoRun, Ring
from moonserve.kvstore.disk.log_state import Segment
from moonserve.kvstore.disk.segment_lifecycle import OpenSegments
from moonserve.protocol.process.event_loop import BackgroundTasks

_LARGEST_RUN_BYTES = 4 * 2**20
_SMALLEST_RUN_BYTES = 256 * 2**10
"""Smaller runs cost more in system calls than parallelism gains."""
_NOT_PLACED = LogEntry(0, 0, PageKind.END)


class WriteCall:
    """Items of one caller, answered together."""

    def __init__(self, num_items: int) -> None:
        self.places: list[Place | None] = [None] * num_items
        self.answer: OwnedResult[list[Place | None]] = OwnedResult()
        self._left = num_items
        self._segments: list[Segment] = []

    def hold_segment(self, segment: Segment) -> None:
        """Keeps the segment from compaction until `release_segments`."""
        if segment not in self._segments:
            self._segments.append(segment)
            segment.num_pending += 1

    def release_segments(self) -> None:
        """Releases the call's segments, after the caller has its answer."""
        for segment in self._segments:
            segment.num_pending -= 1

    def settle(self, index: int, place: Place | None) -> None:
        self.places[index] = place
        self._left -= 1
        if not self._left:
            self.answer.set_result(self.places)


@dataclass(slots=True, eq=False)
class LogItem:
    """An item to append: an object, or a page of tombstones."""

    call: WriteCall
    index: int
    num_pages: int
    footer_bytes: tuple[int, int]
    """Bytes added to the footer's records and to its tombstones."""
    write: DiskWrite | None = None
    tombstones: Sequence[Tombstone] = ()
    source: int = 0
    entry: LogEntry = _NOT_PLACED

    def set_place(self, segment: int, page: int) -> None:
        """Sets the item's place and encodes it: the encoding contains the place."""
        write = self.write
        if write is not None:
            encoded = encode_record(write.object, page, self.source)
            self.entry = LogEntry(page, self.num_pages, PageKind.OBJECT, encoded, write.memory)
        else:
            self.tombstones = [replace(each, segment=each.segment or segment) for each in self.tombstones]
            self.entry = LogEntry(page, 1, PageKind.TOMBSTONES, pack_tombstones(self.tombstones))


@dataclass(slots=True, eq=False)
class WriteGroup:
    """Items written together, in one segment."""

    items: Sequence[LogItem]
    segment: Segment
    begin: int
    end: int  # page after the items, which gets an end mark
    is_written: bool = False
    error: OSError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the group, with its end mark."""
        return (self.end + 1 - self.begin) * PAGE

    @property
    def entries(self) -> list[LogEntry]:
        return [*[item.entry for item in self.items], LogEntry(self.end, 1, PageKind.END)]


def object_items(writes: Sequence[DiskWrite], call: WriteCall, source: int) -> list[LogItem]:
    return [
        LogItem(
            call,
            index,
            extent_pages(write.object.length),
            (record_bytes(write.object), 0),
            write,
            source=source,
        )
        for index, write in enumerate(writes)
    ]


def tombstone_items(tombstones: Sequence[Tombstone]) -> list[LogItem]:
    """Returns one item per page of tombstones, in a call of their own."""
    begins = range(0, len(tombstones), TOMBSTONES_PER_PAGE)
    pieces = [tombstones[begin : begin + TOMBSTONES_PER_PAGE] for begin in begins]
    call = WriteCall(len(pieces))
    return [
        LogItem(call, index, 1, (0, TOMBSTONE_BYTES * len(piece)), tombstones=piece)
        for index, piece in enumerate(pieces)
    ]


def run_limit(nbytes: int, num_threads: int) -> int:
    """Returns the bytes per thread when `nbytes` are to be moved."""
    return min(max(nbytes // num_threads, _SMALLEST_RUN_BYTES), _LARGEST_RUN_BYTES)


def split_into_runs(group: WriteGroup, limit: int) -> list[Sequence[LogEntry]]:
    """Returns adjacent entries, one write each: `limit` bytes or more, in whole entries; end mark last."""
    if group.nbytes <= limit:
        return [group.entries]
    *entries, end = group.entries
    runs: list[list[LogEntry]] = [[]]
    run_bytes = 0
    for entry in entries:
        if run_bytes >= limit:
            runs.append([])
            run_bytes = 0
        runs[-1].append(entry)
        run_bytes += entry.num_pages * PAGE
    runs[-1].append(end)
    return [*runs]


RUN_BYTES = 2 * 2**20
"""Bytes per ring operation, in whole objects: two objects of 1 MiB in one operation take less CPU time."""

logger = logging.getLogger(__name__)

GroupWritten = Callable[[WriteGroup], None]
"""Called in the event loop when a group is on disk, or failed (`WriteGroup.error`)."""


class GroupWriter:
    def __init__(
        self,
        segments: OpenSegments,
        io: ObjectIo,
        ring: Ring | None,
        on_written: GroupWritten,
    ) -> None:
        self._segments = segments
        self._io = io
        self._ring = ring
        self._on_written = on_written
        self._tasks = BackgroundTasks()

    def begin(self, group: WriteGroup) -> None:
        """Starts writing a group. Groups in flight touch disjoint pages."""
        if self._ring is None or not self._begin_in_ring(self._ring, group):
            self._begin_in_threads(group)

    def _begin_in_ring(self, ring: Ring, group: WriteGroup) -> bool:
        file = self._segments.files[group.segment.number]
        pages = ring.pages()

        def on_released() -> None:  # also after a hang, once the kernel has released them
            file.release()
            pages.give_back()

        file.hold()
        asked = self._laid_out(file, group, pages)
        if asked is None or not ring.takes(asked):
            on_released()
            return False
        ring.submit(DiskOperation.WRITE, asked, on_done=partial(self._ended, group), on_released=on_released)
        return True

    def _laid_out(self, file: SegmentFile, group: WriteGroup, pages: RingPages) -> list[IoRun] | None:
        """Returns the group as ring operations, or None if there are too few pages."""
        try:
            return [self._io.lay_out(file, entries, pages) for entries in split_into_runs(group, RUN_BYTES)]
        except OutOfPages:
            return None

    def _ended(self, group: WriteGroup, flight: Flight) -> None:
        if flight.given_up:
            group.error = OSError(errno.ETIMEDOUT, "the disk does not answer")
        elif flight.failed:
            self._begin_in_threads(group)  # a thread writes the same bytes again, and reports why they fail
            return
        self._on_written(group)

    def _begin_in_threads(self, group: WriteGroup) -> None:
        self._tasks.start(self._write(group))

    async def _write(self, group: WriteGroup) -> None:
        try:
            group.error = await self._written(group)
        except Exception:  # callers wait for the result
            logger.exception("a group of writes to the SSD tier is refused: this is a bug")
            group.error = OSError("not written")
        self._on_written(group)

    async def _written(self, group: WriteGroup) -> OSError | None:
        file = self._segments.files[group.segment.number]
        threads = self._segments.threads
        limit = run_limit(group.nbytes, threads.num_threads)
        jobs = [partial(self._io.write, file, entries) for entries in split_into_runs(group, limit)]
        file.hold()
        outcomes = await threads.run(jobs, on_released=file.release)
        return next((outcome for outcome in outcomes if outcome is not None), None)
