"""Recovery: finds the folder's objects after a restart, from the segments alone.

First every segment is surveyed, several at once, since any of them may hold the tombstone of an object in another. Then
objects are yielded segment by segment, the latest first. A copy made by compaction is thus met before its source, so
only copies need to be remembered. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kvstore.disk.base import DiskObject, Place
from kvstore.disk.files import SegmentFile
from kvstore.disk.folder import Folder
from kvstore.disk.format import (
    LOG_BEGIN,
    Record,
    Tombstone,
    encode_record,
    footer_pages,
    place_of,
    unpack_tombstones,
)
from kvstore.disk.health import Doing
from kvstore.disk.log import Segment
from kvstore.disk.segments import Segments
from kvstore.disk.survey import Pins, Survey, Surveyor
from protocol.keys import BlockKey

logger = logging.getLogger(__name__)

Found = list[tuple[DiskObject, Place]]

_NOTHING = (-1, 0)
_PIECE = 4096
"""Objects per batch."""
_SURVEY_SHARE = 0.2
"""Share of the progress; reading records is most of the work."""


@dataclass(slots=True)
class Known:
    """Decides which records still count. Pure."""

    forgotten: dict[BlockKey, tuple[int, int]] = field(default_factory=dict)
    """Forgotten keys, each up to a generation and, in segments, up to a number (both inclusive)."""
    uncovered: list[Tombstone] = field(default_factory=list)
    """Tombstones for copies of forgotten objects in later segments than the original tombstone covers."""
    pins: Pins = field(default_factory=Pins)
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

    def counts(self, record: Record, segment: int) -> bool:
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

    def __init__(self, folder: Folder, segments: Segments, surveyor: Surveyor, pins: Pins) -> None:
        self._folder = folder
        self._segments = segments
        self._surveyor = surveyor
        self._known = Known(pins=pins)

    @property
    def uncovered(self) -> Sequence[Tombstone]:
        """Tombstones to write before the segments that they make up for are freed. Complete once recovery ends."""
        return self._known.uncovered

    async def run(self, progress: Callable[[float], None]) -> AsyncGenerator[Found, None]:
        """Yields the objects found. Ends early if the whole disk fails; its health then reports that."""
        try:
            await self._open()
            async with aclosing(self._found(progress)) as found:
                async for piece in found:
                    yield piece
        except OSError as error:
            self._segments.failed(Doing.READ, error)

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

    async def _survey(self, progress: Callable[[float], None]) -> list[Survey]:
        """Surveys all segments, latest first."""
        numbers = sorted(self._segments.files, reverse=True)
        surveys = []
        step = 4 * self._segments.threads.num_threads
        for begin in range(0, len(numbers), step):
            files = [self._segments.files[number] for number in numbers[begin : begin + step]]
            surveys += await self._surveyed(files)
            progress(_SURVEY_SHARE * (begin + len(files)) / len(numbers))
        for survey in surveys:
            self._known.forget(survey.tombstones)
        return surveys

    async def _surveyed(self, files: Sequence[SegmentFile]) -> list[Survey]:
        def job(file: SegmentFile) -> Callable[[], Survey]:
            return lambda: self._surveyor.survey(file)

        outcomes = await self._segments.threads.run([job(file) for file in files])
        surveys = []
        for outcome in outcomes:
            if isinstance(outcome, OSError):
                raise outcome
            surveys.append(outcome)
        return surveys

    async def _with_records(self, surveys: Sequence[Survey]) -> AsyncIterator[tuple[int, Survey, list[Record]]]:
        """Yields surveys with their records, in order, reading ahead the records of the next segments."""
        ahead: deque[tuple[int, Survey, asyncio.Task[list[Record]]]] = deque()
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

    async def _records(self, survey: Survey) -> list[Record]:
        file = self._segments.files[survey.number]
        with file:
            return await self._segments.threads.call(lambda: self._surveyor.records(file, survey))

    def _adopted(self, survey: Survey, records: Sequence[Record]) -> Found:
        """Adds the segment to the log and returns its live objects."""
        segment = Segment(survey.number, survey.num_pages)
        found: Found = []
        if survey.error is not None:
            # It may be readable after the next restart, so it must not be overwritten until then.
            segment.add(LOG_BEGIN, survey.num_pages - LOG_BEGIN, live=True)
            self._segments.failed(Doing.READ, survey.error)
        else:
            for record in records:
                live = self._known.counts(record, survey.number)
                segment.add(record.page, record.num_pages, live=live)
                if live:
                    about = self._known.pins.current(record.object)
                    found.append((about, place_of(survey.number, record.page)))
            self._finish(segment, survey, records)
        self._segments.log.adopt(segment)
        return found

    def _finish(self, segment: Segment, survey: Survey, records: Sequence[Record]) -> None:
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
                segment.keep_record(encode_record(record))
            segment.footer = footer_pages(len(segment.records), len(segment.tombstones))
        else:
            segment.footer = footer_pages(survey.trailer.records_bytes, survey.trailer.tombstones_bytes)
            segment.forget_footer()

    async def _footer(self, survey: Survey) -> None:
        """Writes the footer of a scanned segment, so that it is not scanned again."""
        segment = self._segments.log.segments.get(survey.number)
        if segment is None or not segment.footer or survey.trailer is not None:
            return
        if segment.tail + segment.footer <= segment.num_pages and self._segments.may_write():
            await self._segments.write_footer(segment)
        segment.forget_footer()
