"""Recovery: finds the folder's objects after a restart, from the segments alone.

First every segment is scanned, several at once, since any of them may hold the tombstone of an object in another. Then
objects are yielded segment by segment, the latest first. A copy made by compaction is thus met before its source, so
only copies need to be remembered. Belongs to one event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from functools import partial

from xxhash import xxh3_64_intdigest

from moonserve.kvstore.disk.base import PAGE, DiskObject, Pin, Place
from moonserve.kvstore.disk.health import DiskOperation
from moonserve.kvstore.disk.io.buffers import AlignedScratch
from moonserve.kvstore.disk.io.folder import Folder
from moonserve.kvstore.disk.io.format import (
    LOG_BEGIN,
    Header,
    PageKind,
    Record,
    Tombstone,
    Trailer,
    decode_head,
    decode_header,
    decode_records,
    decode_trailer,
    encode_record,
    footer_pages,
    pages,
    place_of,
    unpack_tombstones,
)
from moonserve.kvstore.disk.io.object_io import ObjectIo
from moonserve.kvstore.disk.io.segment_file import FileWindow, SegmentFile
from moonserve.kvstore.disk.log_state import Segment
from moonserve.kvstore.disk.segment_lifecycle import OpenSegments
from moonserve.protocol.kv_blocks import BlockKey

logger = logging.getLogger(__name__)

Found = list[tuple[DiskObject, Place]]

_NOTHING = (-1, 0)
_PIECE = 4096
"""Objects per batch."""
_SURVEY_SHARE = 0.2
"""Share of the progress; reading records is most of the work."""
_IN_LOG = (PageKind.OBJECT, PageKind.TOMBSTONES)


@dataclass(slots=True)
class SegmentContents:
    number: int
    num_pages: int
    log_end: int = LOG_BEGIN
    tombstones: bytes = b""
    trailer: Trailer | None = None
    """None: the segment was scanned, or must be."""
    records: list[Record] = field(default_factory=list)
    """Records of a scanned segment. Records of a footer are read on demand."""
    torn: str = ""
    """Reason why the log ends early; empty if it ends properly."""
    error: OSError | None = None
    """Read error; the contents are then unknown."""


class SegmentScanner:
    """Reads the contents of segments from their footers or, without one, by scanning their logs. For I/O threads.

    A log is valid up to the first invalid page, data included. It ends well if that page is the end mark of its last
    group. Knows nothing of other segments, so it does not know which objects are live.
    """

    def __init__(self, folder: Folder, io: ObjectIo, scratch: AlignedScratch) -> None:
        self._folder = folder
        self._io = io
        self._scratch = scratch

    def scan(self, file: SegmentFile) -> SegmentContents:
        """Surveys a segment, without the records of its footer."""
        survey = SegmentContents(file.number, file.num_pages)
        try:
            self._read_head(file, survey)
            if not self._read_trailer(file, survey):
                self._scan(file, survey)
        except OSError as error:
            survey.error = error
        return survey

    def records(self, file: SegmentFile, survey: SegmentContents) -> list[Record]:
        """Returns all objects of the log, dead ones included. A footer that proves invalid leads to a scan."""
        if survey.trailer is None:
            return survey.records
        try:
            behind = pages(survey.trailer.tombstones_bytes)
            packed = self._section(file, survey, survey.trailer.records_bytes, behind)
            if xxh3_64_intdigest(packed) == survey.trailer.records_checksum:
                return decode_records(packed, survey.trailer.num_records)
            survey.trailer, survey.tombstones, survey.log_end = None, b"", LOG_BEGIN
            self._scan(file, survey)
        except OSError as error:
            survey.error = error
        return survey.records

    def _read_head(self, file: SegmentFile, survey: SegmentContents) -> None:
        """Reads the head. A truncated file still counts with all its pages; a damaged head is harmless."""
        head = self._read(file, 0, 1)
        num_pages = decode_head(memoryview(head), self._folder.context(file.number, 0))
        survey.num_pages = num_pages or max(survey.num_pages, LOG_BEGIN + 1)

    def _read_trailer(self, file: SegmentFile, survey: SegmentContents) -> bool:
        last = survey.num_pages - 1
        page = memoryview(self._read(file, last, 1))
        trailer = decode_trailer(page, self._folder.context(file.number, last))
        if trailer is None:
            return False
        packed = self._section(file, survey, trailer.tombstones_bytes)
        if xxh3_64_intdigest(packed) != trailer.tombstones_checksum:
            return False
        survey.trailer, survey.log_end, survey.tombstones = trailer, trailer.log_end, packed
        return True

    def _section(self, file: SegmentFile, survey: SegmentContents, nbytes: int, behind: int = 0) -> bytes:
        """Reads a section of the footer that has `behind` pages between it and the trailer."""
        num_pages = pages(nbytes)
        return self._read(file, survey.num_pages - 1 - behind - num_pages, num_pages)[:nbytes]

    def _read(self, file: SegmentFile, page: int, num_pages: int) -> bytes:
        if not num_pages:
            return b""
        with self._scratch.borrow(num_pages * PAGE) as scratch:
            nbytes = file.read(page, [scratch[: num_pages * PAGE]])
            return bytes(scratch[:nbytes])

    def _scan(self, file: SegmentFile, survey: SegmentContents) -> None:
        with closing(FileWindow(file, self._scratch)) as window:
            for header in self._headers(window, survey):
                if header.kind is PageKind.TOMBSTONES:
                    survey.tombstones += header.tombstones
                    survey.log_end += 1
                elif header.record is not None:
                    survey.records.append(header.record)
                    survey.log_end += header.record.num_pages

    def _headers(self, window: FileWindow, survey: SegmentContents) -> Iterator[Header]:
        """Yields headers up to the end of the log. The caller advances `log_end`."""
        while True:
            page = survey.log_end
            context = self._folder.context(survey.number, page)
            header = decode_header(window.view(page, 1), context)
            if header is not None and header.kind is PageKind.END:
                if not self._goes_on(window, survey.number, page + 1):
                    return
                survey.log_end += 1
                continue
            if header is None:
                survey.torn = f"no header in page {page}"
            elif header.record and not self._is_whole(window, survey.number, header):
                survey.torn = f"damaged object in page {page}"
            if header is None or survey.torn or header.kind not in _IN_LOG:
                return
            yield header

    def _goes_on(self, window: FileWindow, number: int, page: int) -> bool:
        """True if a group that was started while the end mark was being written follows it."""
        header = decode_header(window.view(page, 1), self._folder.context(number, page))
        return header is not None and header.kind in _IN_LOG

    def _is_whole(self, window: FileWindow, segment: int, header: Header) -> bool:
        assert header.record is not None
        num_pages = header.record.num_pages
        extent = window.view(header.record.page, num_pages)
        return len(extent) == num_pages * PAGE and self._io.is_whole(segment, header, extent)


class PinChanges:
    """Pins changed after their objects were written, from the log of one folder.

    Takes about 200 bytes for each changed key.
    """

    def __init__(self) -> None:
        self._latest: dict[BlockKey, tuple[int, Pin]] = {}

    def note(self, change: Tombstone) -> None:
        """Records a pin change."""
        assert change.pin is not None
        known = self._latest.get(change.key)
        if known is None or change.generation > known[0]:
            self._latest[change.key] = change.generation, change.pin

    def current(self, about: DiskObject) -> DiskObject:
        """Returns the object with its current pin."""
        number, pin = self._latest.get(about.key, (0, about.pin))
        return about if number < about.generation or pin is about.pin else replace(about, pin=pin)


@dataclass(slots=True)
class RecordFilter:
    """Decides which records still count. Pure."""

    forgotten: dict[BlockKey, tuple[int, int]] = field(default_factory=dict)
    """Forgotten keys, each up to a generation and, in segments, up to a number (both inclusive)."""
    uncovered: list[Tombstone] = field(default_factory=list)
    """Tombstones for copies of forgotten objects in later segments than the original tombstone covers."""
    pins: PinChanges = field(default_factory=PinChanges)
    copied: set[int] = field(default_factory=set)
    """Objects found as copies: hashes of key and generation, about 90 bytes each, kept until recovery ends."""

    def forget(self, packed: bytes) -> None:
        for each in unpack_tombstones(packed):
            if each.pin is not None:
                self.pins.note(each)
            else:
                generation, until = self.forgotten.get(each.key, _NOTHING)
                self.forgotten[each.key] = (
                    max(each.generation, generation),
                    max(each.segment, until),
                )

    def still_counts(self, record: Record, segment: int) -> bool:
        """Returns True if a record still counts. Call it for later segments first.

        For tombstones, a copy counts as lying in its source segment. An object that failed in a segment, and is
        forgotten there, may have been written again to a later one, but not copied to it.

        A segment that could not be emptied keeps objects that were copied out of it. Their copies may have been copied
        again, from a segment that is gone. A copy therefore rules out every earlier record of its object, in any
        segment.
        """
        about = record.object
        generation, until = self.forgotten.get(about.key, _NOTHING)
        if about.generation <= generation and (record.source or segment) <= until:
            if segment > until:
                self.uncovered.append(Tombstone(about.key, about.generation, segment))
            return False
        identity = hash((about.key, about.generation))
        if identity in self.copied:
            return False
        if record.source:
            self.copied.add(identity)
        return True


class Recovery:
    """Recovers one folder, once."""

    def __init__(self, folder: Folder, segments: OpenSegments, scanner: SegmentScanner, pins: PinChanges) -> None:
        self._folder = folder
        self._segments = segments
        self._scanner = scanner
        self._filter = RecordFilter(pins=pins)

    @property
    def uncovered(self) -> Sequence[Tombstone]:
        """Tombstones to write before the segments that they make up for are freed. Complete once recovery ends."""
        return self._filter.uncovered

    async def run(self, progress: Callable[[float], None]) -> AsyncGenerator[Found, None]:
        """Yields the objects found. Ends early if the whole disk fails; its health then reports that."""
        try:
            await self._open()
            async with aclosing(self._found(progress)) as found:
                async for piece in found:
                    yield piece
        except OSError as error:
            self._segments.report_error(DiskOperation.READ, error)

    async def _found(self, progress: Callable[[float], None]) -> AsyncGenerator[Found, None]:
        surveys = await self._survey(progress)
        async for done, survey, records in self._with_records(surveys):
            progress(_SURVEY_SHARE + (1 - _SURVEY_SHARE) * done / len(surveys))
            found = self._adopted(survey, records)
            for begin in range(0, len(found), _PIECE):
                yield found[begin : begin + _PIECE]
            await self._footer(survey)
        progress(1.0)

    async def _open(self) -> None:
        files = await self._segments.threads.call(
            lambda: [self._folder.open(number) for number in self._folder.segments()]
        )
        self._segments.files.update({file.number: file for file in files})

    async def _survey(self, progress: Callable[[float], None]) -> list[SegmentContents]:
        """Surveys all segments, latest first."""
        numbers = sorted(self._segments.files, reverse=True)
        surveys = []
        step = 4 * self._segments.threads.num_threads
        for begin in range(0, len(numbers), step):
            files = [self._segments.files[number] for number in numbers[begin : begin + step]]
            surveys += await self._surveyed(files)
            progress(_SURVEY_SHARE * (begin + len(files)) / len(numbers))
        for survey in surveys:
            self._filter.forget(survey.tombstones)
        return surveys

    async def _surveyed(self, files: Sequence[SegmentFile]) -> list[SegmentContents]:
        outcomes = await self._segments.threads.run([partial(self._scanner.scan, file) for file in files])
        surveys = []
        for outcome in outcomes:
            if isinstance(outcome, OSError):
                raise outcome
            surveys.append(outcome)
        return surveys

    async def _with_records(
        self, surveys: Sequence[SegmentContents]
    ) -> AsyncIterator[tuple[int, SegmentContents, list[Record]]]:
        """Yields surveys with their records, in order, reading ahead the records of the next segments."""
        ahead: deque[tuple[int, SegmentContents, asyncio.Task[list[Record]]]] = deque()
        try:
            for number, survey in enumerate(surveys):
                ahead.append((number, survey, asyncio.create_task(self._records(survey))))
                if len(ahead) > self._segments.threads.num_threads:
                    done, first, task = ahead.popleft()
                    yield done, first, await task
            while ahead:
                done, first, task = ahead.popleft()
                yield done, first, await task
        finally:
            if ahead:
                await asyncio.wait([task for _, _, task in ahead])

    async def _records(self, survey: SegmentContents) -> list[Record]:
        file = self._segments.files[survey.number]
        with file:
            return await self._segments.threads.call(lambda: self._scanner.records(file, survey))

    def _adopted(self, survey: SegmentContents, records: Sequence[Record]) -> Found:
        """Adds the segment to the log and returns its live objects."""
        segment = Segment(survey.number, survey.num_pages)
        found: Found = []
        if survey.error is not None:
            # It may be readable after the next restart, so it must not be overwritten until then.
            segment.add(LOG_BEGIN, survey.num_pages - LOG_BEGIN, live=True)
            self._segments.report_error(DiskOperation.READ, survey.error)
        else:
            for record in records:
                live = self._filter.still_counts(record, survey.number)
                segment.add(record.page, record.num_pages, live=live)
                if live:
                    about = self._filter.pins.current(record.object)
                    found.append((about, place_of(survey.number, record.page)))
            self._finish(segment, survey, records)
        self._segments.log.adopt(segment)
        return found

    def _finish(self, segment: Segment, survey: SegmentContents, records: Sequence[Record]) -> None:
        if survey.log_end > segment.tail:
            segment.add(survey.log_end, 0, live=False)
        segment.written = survey.log_end
        until = max((each.segment for each in unpack_tombstones(survey.tombstones)), default=0)
        segment.keep_tombstones(survey.tombstones, until)
        if survey.torn:
            self._segments.counters["corrupt_tails"] += 1
            logger.warning(
                "SSD tier: segment %d was cut off at page %d, behind %d objects: %s",
                survey.number,
                survey.log_end,
                len(records),
                survey.torn,
            )
        if survey.trailer is None:
            for record in records:
                segment.keep_record(encode_record(record.object, record.page, record.source))
            segment.footer = footer_pages(len(segment.records), len(segment.tombstones))
        else:
            segment.footer = footer_pages(survey.trailer.records_bytes, survey.trailer.tombstones_bytes)
            segment.forget_footer()

    async def _footer(self, survey: SegmentContents) -> None:
        """Writes the footer of a scanned segment, so that it is not scanned again."""
        segment = self._segments.log.segments.get(survey.number)
        if segment is None or not segment.footer or survey.trailer is not None:
            return
        if segment.tail + segment.footer <= segment.num_pages and self._segments.may_write():
            await self._segments.write_footer(segment)
        segment.forget_footer()
