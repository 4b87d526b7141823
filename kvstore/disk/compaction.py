"""Compaction reclaims whole segments: it copies a segment's live objects to the end of the log, then frees the file.

It runs in the background while few segments are free. A crash at any time leaves an object at its old place, its new
one, or both; recovery yields it once. A copy gets its object's current pin. Tombstones are copied as long as another
segment may hold objects they forbid. A tombstone is added for each copied object that was no longer needed after the
copy, because the copy may lie behind the tombstone its owner wrote meanwhile. No source segment is freed before these
tombstones are durable.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack

from moonserve.kvstore.disk.base import PAGE, DiskRead, DiskWrite, Moved, Pin, Place
from moonserve.kvstore.disk.health import DiskOperation
from moonserve.kvstore.disk.io.buffers import AlignedScratch
from moonserve.kvstore.disk.io.format import Record, Tombstone, pages, place_of, segment_of, unpack_tombstones
from moonserve.kvstore.disk.log_state import KEPT_FOR_COMPACTION, Segment
from moonserve.kvstore.disk.reader import Reader
from moonserve.kvstore.disk.recovery import PinChanges, SegmentScanner
from moonserve.kvstore.disk.segment_lifecycle import Flusher, OpenSegments
from moonserve.kvstore.disk.writer import Writer
from moonserve.protocol.kv_blocks import BlockKey

logger = logging.getLogger(__name__)

_BATCH_BYTES = 8 * 2**20
"""Bytes copied per batch, so that the node's own writes run in between."""
_FREE_SHARE = 1 / 16
"""Share of all segments that is kept free ahead of need."""


class Compactor:
    """Copies live objects and frees segments in the background. Belongs to one event loop."""

    def __init__(
        self,
        segments: OpenSegments,
        scanner: SegmentScanner,
        reader: Reader,
        writer: Writer,
        flusher: Flusher,
        scratch: AlignedScratch,
        moved: Moved,
        pins: PinChanges,
    ) -> None:
        self._segments = segments
        self._log = segments.log
        self._counters = segments.counters
        self._scanner = scanner
        self._reader = reader
        self._writer = writer
        self._flusher = flusher
        self._scratch = scratch
        self._moved = moved
        self._pins = pins
        self._unwanted: list[Tombstone] = []
        """Tombstones for copies that were no longer needed. They become durable before any segment is freed."""
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def add_tombstones(self, tombstones: Iterable[Tombstone]) -> None:
        """Adds tombstones for copies made before the restart."""
        self._unwanted += tombstones

    def wake(self) -> None:
        """Starts compaction if a segment is worth compacting."""
        if self._task is None and self._next() is not None:
            self._task = asyncio.create_task(self._run())

    def wake_if_useful(self) -> bool:
        """Starts compaction if useful. Returns True if a segment may soon be free."""
        self.wake()
        return self._task is not None

    async def wait_until_idle(self) -> None:
        """Waits until there is nothing more to reclaim."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Stops after the current batch."""
        self._closed = True
        await self.wait_until_idle()

    def _next(self) -> Segment | None:
        log = self._log
        if self._closed or not self._segments.may_write():
            return None
        for segment in log.segments.values():
            if segment.is_compactable and log.is_dead(segment):
                return segment
        low = max(KEPT_FOR_COMPACTION + 2, int(log.num_segments * _FREE_SHARE))
        return log.next_to_compact() if log.free_segments < low else None

    async def _run(self) -> None:
        try:
            while (segment := self._next()) is not None:
                await self._compact(segment)
                self._writer.space_changed()
        except Exception:  # nobody awaits this task, so a raised error would surface only at shutdown
            logger.exception("the SSD tier reclaims no more space: this is a bug")
            self._closed = True
        finally:
            self._task = None
            self._writer.space_changed()

    async def _compact(self, segment: Segment) -> None:
        self._log.compacting(segment)
        emptied = self._log.is_dead(segment) or await self._copy_out(segment)
        settled = await self._unwanted_forgotten()
        # Copies, from this or an earlier attempt, must be durable before their source is overwritten.
        durable = emptied and settled and await self._flusher.flush()
        if durable and await self._segments.retire(segment):
            self._counters["segments_compacted"] += 1
        else:
            self._log.compaction_failed(segment)

    async def _copy_out(self, segment: Segment) -> bool:
        """Copies a segment's live objects and tombstones. False if they could not all be copied."""
        file = self._segments.files[segment.number]
        with file:
            survey = await self._segments.threads.call(lambda: self._scanner.scan(file))
            records = await self._segments.threads.call(lambda: self._scanner.records(file, survey))
        if survey.error is not None:
            self._segments.report_error(DiskOperation.READ, survey.error)
            return False
        if self._log.still_forbids(segment.tombstones_until, without=segment.number):
            needed = merge_tombstones(unpack_tombstones(survey.tombstones))
            if not await self._writer.forget(needed, urgent=True):
                return False
        for batch in self._batches(segment, records):
            if self._closed or not await self._copy(segment, batch):
                return False
        for page in segment.live():  # the footer does not list them, so they cannot be read
            self._drop(place_of(segment.number, page))
        return True

    async def _unwanted_forgotten(self) -> bool:
        """Writes the tombstones for unneeded copies. Returns True once they are durable."""
        if not await self._writer.forget(self._unwanted, urgent=True):
            return False
        self._unwanted.clear()
        return True

    def _batches(self, segment: Segment, records: Sequence[Record]) -> Iterator[list[Record]]:
        """Yields batches of records that are live at that moment."""
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
            # The copy may be on disk nevertheless, which is harmless while its source exists.
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


def merge_tombstones(tombstones: Iterable[Tombstone]) -> list[Tombstone]:
    """Merges tombstones that differ only in the segment, keeping the highest."""
    latest: dict[tuple[BlockKey, int, Pin | None], Tombstone] = {}
    for each in sorted(tombstones, key=lambda each: each.segment):
        latest[each.key, each.generation, each.pin] = each
    return list(latest.values())
