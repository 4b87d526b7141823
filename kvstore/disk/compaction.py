"""Space comes back by whole segments: what is alive in one is copied to the end of the log, then its file is free.

Runs in the background as long as few segments are free. A crash at any time leaves an object at its old place, at its
new one, or at both; recovery gives it once. A copy has the pin that its object has by then. Tombstones are copied as
long as a segment is left that may hold what they forbid, and one is added for whatever nobody wanted any more once it
had been copied: it may lie behind the tombstone that its owner wrote meanwhile, so no source goes before it is durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack

from kvstore.disk.base import PAGE, DiskRead, DiskWrite, Moved, Pin, Place
from kvstore.disk.format import Record, Tombstone, pages, place_of, segment_of, unpack_tombstones
from kvstore.disk.health import Doing
from kvstore.disk.log import KEPT_FOR_COMPACTION, Segment
from kvstore.disk.memory import Scratch
from kvstore.disk.reader import Reader
from kvstore.disk.segments import Flusher, Segments
from kvstore.disk.survey import Pins, Surveyor
from kvstore.disk.writer import Writer
from protocol.keys import BlockKey

logger = logging.getLogger(__name__)

_BATCH_BYTES = 8 * 2**20
"""Copied at once, so that writes of the node get their turn in between."""
_FREE_SHARE = 1 / 16
"""Of all segments, kept free ahead of need."""


class Compactor:
    """Belongs to one event loop."""

    def __init__(
        self,
        segments: Segments,
        surveyor: Surveyor,
        reader: Reader,
        writer: Writer,
        flusher: Flusher,
        scratch: Scratch,
        moved: Moved,
        pins: Pins,
    ) -> None:
        self._segments = segments
        self._log = segments.log
        self._counters = segments.counters
        self._surveyor = surveyor
        self._reader = reader
        self._writer = writer
        self._flusher = flusher
        self._scratch = scratch
        self._moved = moved
        self._pins = pins
        self._unwanted: list[Tombstone] = []
        """Of copies that nobody wanted any more; not durable yet, but before any segment goes."""
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def owe(self, tombstones: Iterable[Tombstone]) -> None:
        """Of copies that were made in an earlier life."""
        self._unwanted += tombstones

    def wake(self) -> None:
        """Space may be needed, or to be had."""
        if self._task is None and self._next() is not None:
            self._task = asyncio.create_task(self._run())

    def is_at_work(self) -> bool:
        """Whether a segment may soon be free."""
        self.wake()
        return self._task is not None

    async def settled(self) -> None:
        """Waits until there is nothing (more) to gain."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Stops between two batches."""
        self._closed = True
        await self.settled()

    def _next(self) -> Segment | None:
        log = self._log
        if self._closed or not self._segments.may_write():
            return None
        for segment in log.segments.values():
            if segment.may_go and log.is_dead(segment):
                return segment
        low = max(KEPT_FOR_COMPACTION + 2, int(log.num_segments * _FREE_SHARE))
        return log.victim() if log.free_segments < low else None

    async def _run(self) -> None:
        try:
            while (segment := self._next()) is not None:
                await self._compact(segment)
                self._writer.room_changed()
        except Exception:  # a held task: raised, it would only be seen at the stop
            logger.exception("the SSD tier reclaims no more space: this is a bug")
            self._closed = True
        finally:
            self._task = None
            self._writer.room_changed()

    async def _compact(self, segment: Segment) -> None:
        self._log.compacting(segment)
        emptied = self._log.is_dead(segment) or await self._emptied(segment)
        settled = await self._unwanted_forgotten()
        # What was copied, now or by an earlier attempt, is durable before its source is written over.
        durable = emptied and settled and await self._flusher.flush()
        if durable and await self._segments.retire(segment):
            self._counters["segments_compacted"] += 1
        else:
            self._log.give_up(segment)

    async def _emptied(self, segment: Segment) -> bool:
        """Copies what is needed of a segment; False when it could not be copied entirely."""
        file = self._segments.files[segment.number]
        with file:
            survey, records = await self._segments.threads.call(lambda: self._surveyor.everything(file))
        if survey.error is not None:
            self._segments.failed(Doing.READ, survey.error)
            return False
        if self._log.still_forbids(segment.tombstones_until, without=segment.number):
            needed = once_each(unpack_tombstones(survey.tombstones))
            if not await self._writer.forget(needed, urgent=True):
                return False
        for batch in self._batches(segment, records):
            if self._closed or not await self._copy(segment, batch):
                return False
        self._drop_rest(segment)
        return True

    async def _unwanted_forgotten(self) -> bool:
        """Whether that is durable."""
        if not await self._writer.forget(self._unwanted, urgent=True):
            return False
        self._unwanted.clear()
        return True

    def _batches(self, segment: Segment, records: Sequence[Record]) -> Iterator[list[Record]]:
        """What is alive when it is asked for."""
        batch: list[Record] = []
        nbytes = 0
        for record in records:
            if not segment.is_live(record.page):
                continue
            if batch and nbytes + record.num_pages * PAGE > _BATCH_BYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(record)
            nbytes += record.num_pages * PAGE
        if batch:
            yield batch

    async def _copy(self, segment: Segment, batch: Sequence[Record]) -> bool:
        with ExitStack() as borrowed:
            reads = self._reads(segment, batch, borrowed)
            good = await self._reader.read(reads)
            if not self._segments.health.may_read():
                return False
            for read, fine in zip(reads, good, strict=True):
                if not fine:
                    self._drop(read.place)
            whole = [read for read, fine in zip(reads, good, strict=True) if fine]
            writes = [DiskWrite(object=self._pins.current(each.object), memory=each.memory) for each in whole]
            places = await self._writer.write(writes, source=segment.number)
        settled = [self._settle(*move) for move in zip(whole, places, strict=True)]
        return all(settled)

    def _reads(self, segment: Segment, batch: Sequence[Record], borrowed: ExitStack) -> list[DiskRead]:
        nbytes = [pages(record.object.length) * PAGE for record in batch]
        memory = borrowed.enter_context(self._scratch.borrow(sum(nbytes) or 1))
        reads, begin = [], 0
        for record, padded in zip(batch, nbytes, strict=True):
            into = memory[begin : begin + record.object.length]
            place = place_of(segment.number, record.page)
            reads.append(DiskRead(object=record.object, place=place, memory=into))
            begin += padded
        return reads

    def _settle(self, read: DiskRead, place: Place | None) -> bool:
        if place is None:
            # Perhaps it is on disk nevertheless: that does no harm while its source counts.
            if not self._log.is_live(read.place):
                self._forget(read, max(self._log.segments))
            return False
        if self._moved(read.object, read.place, place):
            self._counters["objects_moved"] += 1
        else:
            self._log.release(place)
            self._forget(read, segment_of(place))
        self._log.release(read.place)
        return True

    def _forget(self, read: DiskRead, until: int) -> None:
        self._unwanted.append(Tombstone(read.object.key, read.object.generation, until))

    def _drop(self, place: Place) -> None:
        if self._log.release(place):
            self._counters["objects_rotten"] += 1
            logger.warning("an object at %#x of the SSD tier is damaged and was dropped", place)

    def _drop_rest(self, segment: Segment) -> None:
        """What the footer does not know cannot be read either."""
        for page in segment.live():
            self._drop(place_of(segment.number, page))


def once_each(tombstones: Iterable[Tombstone]) -> list[Tombstone]:
    """Of several that say the same, the one that says it of the most segments."""
    latest: dict[tuple[BlockKey, int, Pin | None], Tombstone] = {}
    for each in sorted(tombstones, key=lambda each: each.segment):
        latest[each.key, each.generation, each.pin] = each
    return list(latest.values())
