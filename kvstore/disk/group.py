"""Groups of items for group commit, and their transport to the disk through the ring or by threads.

A group is pure except for the futures of its callers. `Carrier` belongs to one event loop, and knows neither what
happens after a group nor what is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from kvstore.disk.base import PAGE, DiskWrite, Place
from kvstore.disk.files import SegmentFile
from kvstore.disk.format import (
    TOMBSTONE_BYTES,
    TOMBSTONES_PER_PAGE,
    Kind,
    Record,
    Tombstone,
    encode_record,
    extent_pages,
    pack_tombstones,
    page_of,
    record_bytes,
    segment_of,
)
from kvstore.disk.health import Doing
from kvstore.disk.log import Segment
from kvstore.disk.memory import OutOfPages
from kvstore.disk.object_io import Entry, ObjectIo, Pages
from kvstore.disk.ring import Flight, Ring, Run
from kvstore.disk.segments import Segments
from kvstore.disk.threads import Answer
from protocol.held_tasks import HeldTasks

_LARGEST_RUN_BYTES = 4 * 2**20
_SMALLEST_RUN_BYTES = 256 * 2**10
"""Smaller runs cost more in system calls than parallelism gains."""


class Call:
    """Items of one caller, answered together."""

    def __init__(self, num_items: int) -> None:
        self.places: list[Place | None] = [None] * num_items
        self.answer: Answer[list[Place | None]] = Answer()
        self._left = num_items
        self._segments: list[Segment] = []

    def wrote_to(self, segment: Segment) -> None:
        """Keeps the segment from compaction until `heard`."""
        if segment not in self._segments:
            self._segments.append(segment)
            segment.unanswered += 1

    def heard(self) -> None:
        """Releases the call's segments, after the caller has its answer."""
        for segment in self._segments:
            segment.unanswered -= 1

    def settle(self, index: int, place: Place | None) -> None:
        self.places[index] = place
        self._left -= 1
        if not self._left:
            self.answer.give(self.places)


@dataclass(slots=True, eq=False)
class Item:
    """An item to append: an object, or a page of tombstones."""

    call: Call
    index: int
    num_pages: int
    footer_bytes: tuple[int, int]
    """Bytes added to the footer's records and to its tombstones."""
    write: DiskWrite | None = None
    tombstones: Sequence[Tombstone] = ()
    source: int = 0
    page: int = 0  # set by `placed`
    encoded: bytes = b""

    @property
    def entry(self) -> Entry:
        if self.write is not None:
            return Entry(self.page, self.num_pages, Kind.OBJECT, self.encoded, self.write.memory)
        return Entry(self.page, 1, Kind.TOMBSTONES, self.encoded)

    def settle(self, place: Place | None) -> None:
        self.call.settle(self.index, place)

    def placed(self, place: Place) -> None:
        """Sets the item's place and encodes it: the encoding contains the place."""
        self.page = page_of(place)
        if self.write is not None:
            self.encoded = encode_record(Record(self.write.object, self.page, self.source))
        else:
            here = segment_of(place)
            self.tombstones = [replace(each, segment=each.segment or here) for each in self.tombstones]
            self.encoded = pack_tombstones(self.tombstones)


@dataclass(slots=True, eq=False)
class Group:
    """Items written together, in one segment."""

    items: Sequence[Item]
    segment: Segment
    begin: int
    end: int  # page after the items, which gets an end mark
    has_landed: bool = False
    error: OSError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the group, with its end mark."""
        return (self.end + 1 - self.begin) * PAGE

    @property
    def entries(self) -> list[Entry]:
        return [*(item.entry for item in self.items), Entry(self.end, 1, Kind.END)]


def object_items(writes: Sequence[DiskWrite], call: Call, source: int) -> list[Item]:
    return [
        Item(
            call,
            index,
            extent_pages(write.object.length),
            (record_bytes(write.object), 0),
            write,
            source=source,
        )
        for index, write in enumerate(writes)
    ]


def tombstone_items(tombstones: Sequence[Tombstone]) -> list[Item]:
    """Returns one item per page of tombstones, in a call of their own."""
    begins = range(0, len(tombstones), TOMBSTONES_PER_PAGE)
    pieces = [tombstones[begin : begin + TOMBSTONES_PER_PAGE] for begin in begins]
    call = Call(len(pieces))
    return [
        Item(call, index, 1, (0, TOMBSTONE_BYTES * len(piece)), tombstones=piece) for index, piece in enumerate(pieces)
    ]


def run_limit(nbytes: int, num_threads: int) -> int:
    """Returns the bytes per thread when `nbytes` are to be moved."""
    return min(max(nbytes // num_threads, _SMALLEST_RUN_BYTES), _LARGEST_RUN_BYTES)


def runs(group: Group, limit: int) -> Iterator[tuple[Sequence[Entry], int]]:
    """Yields adjacent entries and their bytes, one write each: `limit` or more, in whole entries; end mark last."""
    if group.nbytes <= limit:
        yield group.entries, group.nbytes
        return
    *entries, end = group.entries
    run: list[Entry] = []
    run_bytes = 0
    for entry in entries:
        if run_bytes >= limit:
            yield run, run_bytes
            run, run_bytes = [], 0
        run.append(entry)
        run_bytes += entry.num_pages * PAGE
    yield [*run, end], run_bytes + end.num_pages * PAGE


RUN_BYTES = 2 * 2**20
"""Bytes per ring operation, in whole objects: two objects of 1 MiB in one operation take less CPU time."""

logger = logging.getLogger(__name__)

Landed = Callable[[Group], None]
"""Called in the event loop when a group is on disk, or failed (`Group.error`)."""


class Carrier:
    def __init__(
        self,
        segments: Segments,
        io: ObjectIo,
        ring: Ring | None,
        landed: Landed,
    ) -> None:
        self._segments = segments
        self._io = io
        self._ring = ring
        self._landed = landed
        self._tasks = HeldTasks()

    def begin(self, group: Group) -> None:
        """Starts writing a group. Groups in flight touch disjoint pages."""
        if self._ring is None or not self._begin_in_ring(self._ring, group):
            self._begin_in_threads(group)

    def _begin_in_ring(self, ring: Ring, group: Group) -> bool:
        file = self._segments.files[group.segment.number]
        pages = ring.pages()

        def over() -> None:  # also after a hang, once the kernel has released them
            file.let_go()
            pages.back()

        file.hold()
        asked = self._laid_out(file, group, pages)
        if asked is None or not ring.takes(asked):
            over()
            return False
        ring.begin(Doing.WRITE, asked, landed=partial(self._ended, group), over=over)
        return True

    def _laid_out(self, file: SegmentFile, group: Group, pages: Pages) -> list[Run] | None:
        """Returns the group as ring operations, or None if there are too few pages."""
        fd = file.fileno()
        try:
            return [
                Run(fd, entries[0].page, self._io.laid_out(file.number, entries, pages), nbytes)
                for entries, nbytes in runs(group, RUN_BYTES)
            ]
        except OutOfPages:
            return None

    def _ended(self, group: Group, flight: Flight) -> None:
        if flight.given_up:
            group.error = flight.error()
        elif not all(map(flight.is_whole, range(len(flight.runs)))):
            self._begin_in_threads(group)  # a thread writes the same bytes again, and reports why they fail
            return
        self._landed(group)

    def _begin_in_threads(self, group: Group) -> None:
        self._tasks.start(self._write(group))

    async def _write(self, group: Group) -> None:
        try:
            group.error = await self._written(group)
        except Exception:  # callers wait for the result
            logger.exception("a group of writes to the SSD tier is refused: this is a bug")
            group.error = OSError("not written")
        self._landed(group)

    async def _written(self, group: Group) -> OSError | None:
        file = self._segments.files[group.segment.number]
        threads = self._segments.threads
        limit = run_limit(group.nbytes, threads.num_threads)
        jobs = [partial(self._io.write, file, entries) for entries, _ in runs(group, limit)]
        in_use = ExitStack()
        in_use.enter_context(file)
        outcomes = await threads.run(jobs, over=in_use.close)
        return next((outcome for outcome in outcomes if outcome is not None), None)
