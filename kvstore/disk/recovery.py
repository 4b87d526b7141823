"""What the folder held before the restart, from its segments alone.

First every segment is surveyed, several at once, since any of them may hold the tombstone of an object elsewhere. Then
objects are given segment by segment, the latest first: a copy that compaction made is met before its source, so copies
are only remembered as long as the segment they came from is still there. Belongs to one event loop.
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
"""Objects given at once."""
_SURVEY_SHARE = 0.2
"""Of the progress; records are most of the work."""


@dataclass(slots=True)
class Known:
    """What decides whether a record still counts. Pure."""

    forgotten: dict[BlockKey, tuple[int, int]] = field(default_factory=dict)
    """Generations up to and with the first, in segments up to and with the second."""
    uncovered: list[Tombstone] = field(default_factory=list)
    """Of copies that were made of what was forgotten meanwhile, in later segments than that was said of."""
    pins: Pins = field(default_factory=Pins)
    copied: set[int] = field(default_factory=set)
    """Of objects found in copies: hashes of key and generation, about 90 bytes each until recovery has ended."""

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
        """To be asked with later segments first.

        A copy is where its source was: what could not be written to a segment, and is forgotten there, may have been
        written again to a later one, but not copied to it.

        A segment that could not be emptied keeps what was copied out of it, and the copies may have been copied on
        since, from a segment that is gone: so a copy rules out every earlier record of its object, wherever it lies.
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
    """One use."""

    def __init__(self, folder: Folder, segments: Segments, surveyor: Surveyor, pins: Pins) -> None:
        self._folder = folder
        self._segments = segments
        self._surveyor = surveyor
        self._known = Known(pins=pins)

    @property
    def uncovered(self) -> Sequence[Tombstone]:
        """To be written before the segments go that others were written for; known at the end."""
        return self._known.uncovered

    async def run(self, progress: Callable[[float], None]) -> AsyncGenerator[Found, None]:
        """Ends early when the disk fails as a whole; then its health says so."""
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
        """Latest first."""
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
        """In order, with records of the next segments being read meanwhile."""
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
        """Puts the segment into the log and gives what is alive in it."""
        segment = Segment(survey.number, survey.num_pages)
        found: Found = []
        if survey.error is not None:
            # It may be readable again after the next restart; until then nothing may be written over it.
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
        """A scanned segment need not be scanned again."""
        segment = self._segments.log.segments.get(survey.number)
        if segment is None or not segment.footer or survey.trailer is not None:
            return
        if segment.tail + segment.footer <= segment.num_pages and self._segments.may_write():
            await self._segments.write_footer(segment)
        segment.forget_footer()
