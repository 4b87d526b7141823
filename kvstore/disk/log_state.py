"""State of the log-structured store: segments, the extents in them and which are live. Pure: no I/O, no clock.

A page of a segment is allocated once, and a segment number is never reused. An extent is live from its allocation until
its release; its pages are reclaimed only with its whole segment. Takes 4 bytes of memory per object plus slack,
whatever the object's size. Knows no keys.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum, auto

from moonserve.kvstore.disk.base import PAGE, DiskUsage, Place
from moonserve.kvstore.disk.io.format import (
    LOG_BEGIN,
    TOMBSTONE_BYTES,
    TOMBSTONES_PER_PAGE,
    footer_pages,
    page_of,
    segment_of,
)

KEPT_FOR_COMPACTION = 1
"""Segments that normal writes leave free, so that compaction can always copy one segment's live objects."""

# Not usable for live objects: two segments for writing and compaction, one for space lost at segment ends. Of the rest,
# a sixteenth for footers and dead objects, without which compaction would copy everything to gain a little.
_NUM_RESERVED_SEGMENTS = 3
_LIVE_SHARE = 15 / 16
_TOMBSTONES_SHARE = 1 / 64
_NEARLY_FULL = 3 / 4
"""Fill level at which the next file is prepared. The rest of 256 MiB takes 13 ms at 5 GB/s, a new file under 1 ms."""


class SegmentState(Enum):
    ACTIVE = auto()  # takes appends
    SEALED = auto()
    COMPACTING = auto()  # sealed, and its live objects are being copied


@dataclass(slots=True, eq=False)
class Segment:
    number: int
    num_pages: int
    state: SegmentState = SegmentState.ACTIVE
    tail: int = LOG_BEGIN  # first unallocated page
    written: int = LOG_BEGIN
    """End page of the part that is completely on disk."""
    num_pending: int = 0
    """Calls in flight to this segment, plus one for a footer being written. It is not compacted meanwhile."""
    is_broken: bool = False
    """True after a failed write: recovery would find nothing after it."""
    live_pages: int = 0
    dead_pages: int = 0
    largest_extent: int = 0
    tombstones_until: int = 0
    """Highest segment in which its tombstones forbid objects; 0 = no tombstones."""
    num_records: int = 0
    records: bytearray = field(default_factory=bytearray)
    """Records of the future footer; emptied once the segment is sealed."""
    tombstones: bytearray = field(default_factory=bytearray)
    tombstones_bytes: int = 0
    reserved_records: int = 0
    reserved_tombstones: int = 0
    """Footer bytes reserved for everything appended, durable or not."""
    footer: int = 0
    """Pages; 0 until the segment is sealed."""
    _starts: array[int] = field(default_factory=lambda: array("I"))
    """Extents, ascending: first page << 1 | dead."""

    def add(self, page: int, num_pages: int, *, live: bool) -> None:
        """Adds the next extent. Skipped pages before it count as dead."""
        if page > self.tail:
            self._starts.append(self.tail << 1 | 1)
            self.dead_pages += page - self.tail
        self._starts.append(page << 1 | (not live))
        self.tail = page + num_pages
        if live:
            self.live_pages += num_pages
            if num_pages > self.largest_extent:
                self.largest_extent = num_pages
        else:
            self.dead_pages += num_pages

    def is_live(self, page: int) -> bool:
        return self._find(page) is not None

    def live(self) -> list[int]:
        """Returns the first pages of live extents."""
        return [start >> 1 for start in self._starts if not start & 1]

    def release(self, page: int) -> int:
        """Marks an extent as dead and returns its pages; 0 if it was not live."""
        index = self._find(page)
        if index is None:
            return 0
        self._starts[index] |= 1
        beyond = self._starts[index + 1] >> 1 if index + 1 < len(self._starts) else self.tail
        self.live_pages -= beyond - page
        self.dead_pages += beyond - page
        return beyond - page

    def _find(self, page: int) -> int | None:
        index = bisect_left(self._starts, page << 1)
        alive = index < len(self._starts) and self._starts[index] == page << 1
        return index if alive else None

    def append(self, num_pages: int, footer_bytes: tuple[int, int], *, live: bool, skipped: int = 0) -> int:
        """Allocates the pages behind the next `skipped` ones, and room in the footer (bytes of records, of tombstones).
        Returns the first page; 0 if they do not fit."""
        records_bytes = self.reserved_records + footer_bytes[0]
        tombstones_bytes = self.reserved_tombstones + footer_bytes[1]
        page = self.tail + skipped
        if page + num_pages + footer_pages(records_bytes, tombstones_bytes) > self.num_pages:
            return 0
        self.reserved_records, self.reserved_tombstones = records_bytes, tombstones_bytes
        self.add(page, num_pages, live=live)
        return page

    @property
    def room(self) -> int:
        """Pages not allocated yet."""
        footer = self.footer or footer_pages(self.reserved_records, self.reserved_tombstones)
        return max(0, self.num_pages - self.tail - footer)

    @property
    def is_compactable(self) -> bool:
        """True if the segment may be compacted."""
        return self.state is SegmentState.SEALED and not self.num_pending

    def keep_record(self, encoded: bytes) -> None:
        """Adds a record to the footer."""
        self.records += encoded
        self.num_records += 1

    def keep_tombstones(self, packed: bytes, until: int) -> None:
        """Adds tombstones to the footer, and notes how long they are needed."""
        self.tombstones += packed
        self.tombstones_bytes += len(packed)
        self.tombstones_until = max(self.tombstones_until, until)

    def forget_footer(self) -> None:
        """Frees the footer's memory: it is on disk, or cannot be written."""
        self.records, self.tombstones = bytearray(), bytearray()

    @property
    def packed_tombstones(self) -> int:
        """Pages that its tombstones take when they are copied."""
        return -(-self.tombstones_bytes // (TOMBSTONES_PER_PAGE * TOMBSTONE_BYTES))

    @property
    def reclaimable_pages(self) -> int:
        """Pages that compaction reclaims, tombstones aside. An unused end counts only if the segment's own objects
        could have filled it; a shorter one would be lost in the next segment too."""
        return self.dead_pages + (self.room if self.room >= self.largest_extent else 0)

    @property
    def nbytes(self) -> int:
        return sys.getsizeof(self._starts) + len(self.records) + len(self.tombstones)

    def validate(self) -> None:
        ends = [start >> 1 for start in self._starts[1:]] + [self.tail]
        live = sum(end - (start >> 1) for start, end in zip(self._starts, ends, strict=False) if not start & 1)
        assert live == self.live_pages, f"segment {self.number}: live pages"
        assert LOG_BEGIN + live + self.dead_pages == self.tail <= self.num_pages, self.number
        if self.state is SegmentState.ACTIVE:
            assert len(self.records) <= self.reserved_records, self.number
            assert len(self.tombstones) <= self.reserved_tombstones, self.number


class SegmentLog:
    """All segments of a folder."""

    def __init__(self, capacity: int, segment_bytes: int) -> None:
        self.segment_pages = segment_bytes // PAGE
        self._configured_pages = capacity // segment_bytes * self.segment_pages
        self.segments: dict[int, Segment] = {}
        self.active: Segment | None = None
        self._held_pages = 0
        """Pages of all segments. A counter, because it is needed for each object written."""
        self._fruitless = 0
        """Segments compacted since an object died."""

    @property
    def capacity_pages(self) -> int:
        """Configured capacity in pages; larger while segments from before a reduction are left."""
        return max(self._configured_pages, self._held_pages)

    @property
    def free_segments(self) -> int:
        held = self._held_pages  # read once: this runs for each object written
        return (max(self._configured_pages, held) - held) // self.segment_pages

    @property
    def is_nearly_full(self) -> bool:
        """True if another segment will soon be needed."""
        active = self.active
        return active is not None and active.tail > active.num_pages * _NEARLY_FULL

    @property
    def num_segments(self) -> int:
        """Configured number of segments."""
        return self._configured_pages // self.segment_pages

    @property
    def live_limit(self) -> int:
        usable = self._configured_pages - _NUM_RESERVED_SEGMENTS * self.segment_pages
        return int(max(usable, 0) * PAGE * _LIVE_SHARE)

    def usage(self) -> DiskUsage:
        live = sum(segment.live_pages for segment in self.segments.values())
        room = self.active.room if self.active else 0
        free = self.capacity_pages - self._held_pages + room
        capacity = self.capacity_pages
        return DiskUsage(
            capacity=capacity * PAGE,
            live=live * PAGE,
            dead=(capacity - live - free) * PAGE,
            free=free * PAGE,
        )

    def fits_at_all(self, num_pages: int, records_bytes: int) -> bool:
        """True if an empty segment could hold the object."""
        return LOG_BEGIN + num_pages + footer_pages(records_bytes, 0) <= self.segment_pages

    def may_append(self, *, urgent: bool) -> bool:
        """True if the active segment accepts the write. The segment kept for compaction accepts `urgent` ones only."""
        return urgent or self.free_segments >= KEPT_FOR_COMPACTION

    def may_open(self, *, urgent: bool) -> bool:
        """True if another segment may be opened. Compaction (`urgent`) may exceed the capacity: after a crash the
        segment kept for it may be full of copies."""
        return urgent or self.free_segments > KEPT_FOR_COMPACTION

    def open(self, number: int) -> Segment:
        """Opens the next segment. There must be no active one."""
        assert self.active is None
        assert number not in self.segments
        self.active = self.segments[number] = Segment(number, self.segment_pages)
        self._held_pages += self.segment_pages
        return self.active

    def seal(self) -> Segment:
        """Seals the active segment, which then takes no more appends."""
        assert self.active is not None
        sealed, self.active = self.active, None
        sealed.state = SegmentState.SEALED
        sealed.footer = footer_pages(sealed.reserved_records, sealed.reserved_tombstones)
        return sealed

    def adopt(self, segment: Segment) -> None:
        """Adds a segment found at startup, with its extents."""
        assert segment.number not in self.segments
        segment.state = SegmentState.SEALED
        self.segments[segment.number] = segment
        self._held_pages += segment.num_pages

    def is_live(self, place: Place) -> bool:
        segment = self.segments.get(segment_of(place))
        return segment is not None and segment.is_live(page_of(place))

    def release(self, place: Place) -> bool:
        """Releases an extent. Returns False if it was not live."""
        segment = self.segments.get(segment_of(place))
        if segment is None or not segment.release(page_of(place)):
            return False
        if segment.state is not SegmentState.COMPACTING:
            self._fruitless = 0
        return True

    def still_forbids(self, tombstones_until: int, *, without: int) -> bool:
        """True if a segment other than `without` may hold objects forbidden by such tombstones."""
        oldest = min((each for each in self.segments if each != without), default=None)
        return oldest is not None and oldest <= tombstones_until

    def is_dead(self, segment: Segment) -> bool:
        """True if nothing in the segment is needed."""
        until = segment.tombstones_until
        return not segment.live_pages and not self.still_forbids(until, without=segment.number)

    def next_to_compact(self) -> Segment | None:
        """Returns the segment to compact next: the most space for the least copying, old ones first, since objects left
        in them tend to stay (Rosenblum and Ousterhout, The Design and Implementation of a SegmentLog-Structured File
        System).
        """
        if self._fruitless > len(self.segments):
            return None
        sealed = [each for each in self.segments.values() if each.is_compactable]
        if self._too_many_tombstones():
            return min(sealed, key=lambda each: each.number, default=None)
        candidates = [(self._benefit(each), -each.number) for each in sealed]
        benefit, number = max(candidates, default=(0.0, 0))
        return self.segments[-number] if benefit > 0 else None

    def _too_many_tombstones(self) -> bool:
        """True if tombstones take too much space. They last until all older segments are gone: the oldest must go."""
        held = sum(each.packed_tombstones for each in self.segments.values())
        return held > self.capacity_pages * _TOMBSTONES_SHARE

    def _benefit(self, segment: Segment) -> float:
        gain, cost = segment.reclaimable_pages, segment.live_pages
        if self.still_forbids(segment.tombstones_until, without=segment.number):
            gain -= segment.packed_tombstones
            cost += segment.packed_tombstones
        age = 1 + max(self.segments) - segment.number
        return gain * age / (segment.num_pages + cost)

    def compacting(self, segment: Segment) -> None:
        assert segment.state is SegmentState.SEALED
        segment.state = SegmentState.COMPACTING

    def compaction_failed(self, segment: Segment) -> None:
        """Returns a segment that could not be fully compacted to the sealed state."""
        segment.state = SegmentState.SEALED
        self._fruitless += 1

    def retire(self, segment: Segment) -> None:
        """Frees the segment's pages. It must have no live objects."""
        assert not segment.live_pages, f"segment {segment.number} has live objects"
        assert segment is not self.active
        del self.segments[segment.number]
        self._held_pages -= segment.num_pages
        self._fruitless += 1

    def validate(self) -> None:
        for segment in self.segments.values():
            segment.validate()
            assert (segment.state is SegmentState.ACTIVE) == (segment is self.active)
        held = sum(segment.num_pages for segment in self.segments.values())
        assert held == self._held_pages
        usage = self.usage()
        assert usage.live + usage.dead + usage.free == usage.capacity
        assert min(usage.live, usage.dead, usage.free) >= 0
