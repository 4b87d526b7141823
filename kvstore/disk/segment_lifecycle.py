"""Lifecycle of segments as files and as state: opened, sealed, made durable, retired.

A footer is written only after its log is durable, so whatever it lists exists. Belongs to one event loop. Disk errors
are turned into health here and not passed on.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import ExitStack

from moonserve.kvstore.disk.base import PAGE, Sleep
from moonserve.kvstore.disk.health import DiskHealth, DiskOperation
from moonserve.kvstore.disk.io.buffers import AlignedScratch
from moonserve.kvstore.disk.io.folder import Folder
from moonserve.kvstore.disk.io.format import encode_footer, footer_pages
from moonserve.kvstore.disk.io.segment_file import SegmentFile
from moonserve.kvstore.disk.io.threads import IoThreads
from moonserve.kvstore.disk.log_state import Segment, SegmentLog
from moonserve.protocol.process.event_loop import BackgroundTasks

logger = logging.getLogger(__name__)


class OpenSegments:
    """Open segments of a folder."""

    def __init__(
        self,
        log: SegmentLog,
        folder: Folder,
        threads: IoThreads,
        scratch: AlignedScratch,
        health: DiskHealth,
        counters: Counter[str],
    ) -> None:
        self.log = log
        self.files: dict[int, SegmentFile] = {}
        self.counters = counters
        self.health = health
        self.threads = threads
        self.unnamed: set[int] = set()
        """Segments whose file names are not durable yet."""
        self._folder = folder
        self._scratch = scratch
        self._prepared: asyncio.Task[SegmentFile | None] | None = None
        self._footers = BackgroundTasks()
        self._footed: set[int] = set()
        """Segments whose footers are not durable yet."""
        self.on_durable: Callable[[Segment], None] = lambda segment: None
        """Called when a sealed segment is durable except for its footer."""
        self.on_sealed: Callable[[], None] = lambda: None
        """Called when a segment is finished, with or without a footer."""

    def may_write(self) -> bool:
        return self.health.may_write(asyncio.get_running_loop().time())

    def report_error(self, doing: DiskOperation, error: OSError) -> None:
        self.health.failed(doing, error, asyncio.get_running_loop().time())

    def prepare(self) -> None:
        """Prepares the next segment's file ahead of `begin`."""
        if self._prepared is None and self.log.may_open(urgent=False):
            self._prepared = asyncio.create_task(self._prepare())

    async def begin(self) -> bool:
        """Opens the next segment for appending; False if the disk fails."""
        file = await self._taken()
        if file is None:
            try:
                file = await self.threads.call(self._create)
            except OSError as error:
                self.report_error(DiskOperation.WRITE, error)
                return False
        self.files[file.number] = file
        self.unnamed.add(file.number)
        self.log.open(file.number)
        return True

    def _create(self) -> SegmentFile:
        return self._folder.create(self.log.segment_pages * PAGE)

    async def _prepare(self) -> SegmentFile | None:
        try:
            return await self.threads.call(self._create)
        except OSError as error:  # `begin` retries and reports the error
            logger.debug("the next segment could not be prepared: %s", error)
            return None

    async def _taken(self) -> SegmentFile | None:
        """Returns the prepared file, if any."""
        if self._prepared is None:
            return None
        prepared, self._prepared = self._prepared, None
        return await prepared

    def seal(self, on_written: Callable[[Segment], Awaitable[None]]) -> None:
        """Seals the active segment, if any, in the background. Its footer is written after everything was written."""
        if self.log.active is not None:
            segment = self.log.seal()
            segment.num_pending += 1
            self._footers.start(self._finish(segment, on_written))

    async def wait_for_footer(self) -> bool:
        """Waits until a footer is written; False if none is in flight."""
        if self._footers:
            await asyncio.wait(list(self._footers), return_when=asyncio.FIRST_COMPLETED)
            return True
        return False

    async def sync(self, numbers: Collection[int]) -> bool:
        """Syncs segments and their names. True if everything written is durable. Retired segments count as durable."""
        files = [self.files[number] for number in numbers if number in self.files]
        names = self.unnamed.intersection(numbers)
        jobs: list[Callable[[], None]] = [file.sync for file in files]
        if names:
            jobs.append(self._folder.sync_names)
        in_use = ExitStack()
        for file in files:
            in_use.enter_context(file)
        outcomes = await self.threads.run(jobs, on_released=in_use.close)
        errors = [outcome for outcome in outcomes if outcome is not None]
        for error in errors:
            self.report_error(DiskOperation.WRITE, error)
        if not errors:
            self.unnamed -= names
        return not errors

    async def write_footer(self, segment: Segment) -> None:
        """Writes a footer, which becomes durable when the tier closes. Without it, the next start scans the segment."""
        file = self.files[segment.number]
        file.hold()
        try:
            await self.threads.call(lambda: self._write_footer(file, segment), on_released=file.release)
        except OSError as error:
            self.report_error(DiskOperation.WRITE, error)
        else:
            self._footed.add(segment.number)
        segment.footer = footer_pages(len(segment.records), len(segment.tombstones))
        segment.forget_footer()

    async def _finish(self, segment: Segment, on_written: Callable[[Segment], Awaitable[None]]) -> None:
        try:
            await on_written(segment)
            if self.health.may_read() and await self.sync({segment.number}):
                self.on_durable(segment)
                await self.write_footer(segment)
        except Exception:  # nobody awaits this task, so an error would go unnoticed
            logger.exception("a segment of the SSD tier was not sealed: this is a bug")
        finally:
            segment.forget_footer()
            segment.num_pending -= 1
            self.on_sealed()

    def _write_footer(self, file: SegmentFile, segment: Segment) -> None:
        footer = encode_footer(
            self._folder.context(segment.number, segment.num_pages - 1),
            log_end=segment.written,
            num_records=segment.num_records,
            records=bytes(segment.records),
            tombstones=bytes(segment.tombstones),
        )
        with self._scratch.borrow(len(footer)) as scratch:
            scratch[: len(footer)] = footer
            file.write(segment.num_pages - len(footer) // PAGE, [scratch[: len(footer)]])

    async def retire(self, segment: Segment) -> bool:
        """Retires a segment without live objects, durably; its file is reused later."""
        file = self.files.pop(segment.number)
        self.unnamed.discard(segment.number)
        self._footed.discard(segment.number)
        await file.wait_until_unused()
        try:
            await self.threads.call(lambda: self._folder.recycle(segment.number))
        except OSError as error:
            self.files[segment.number] = file
            self.report_error(DiskOperation.WRITE, error)
            return False
        file.close()
        self.log.retire(segment)
        return True

    async def close(self) -> None:
        """Closes all files but those with hanging operations, whose descriptors must not be reused for other files."""
        await self._drop_prepared()
        if self.health.may_read():
            await self.sync(self._footed)
        for file in self.files.values():
            if self.health.may_read() or not file.in_use:
                await file.wait_until_unused()
                file.close()
        self.files.clear()

    async def _drop_prepared(self) -> None:
        """Turns the prepared, empty file back into a free one."""
        file = await self._taken()
        if file is not None:
            with contextlib.suppress(OSError):  # the next start then finds an empty segment
                await self.threads.call(lambda: self._folder.recycle(file.number))
            file.close()


class Flusher:
    """Makes writes durable within `interval_s`, and on demand.

    Belongs to one event loop. `interval_s` 0 = every write is flushed before it is answered.
    """

    def __init__(self, segments: OpenSegments, interval_s: float, sleep: Sleep) -> None:
        self._segments = segments
        self._interval_s = interval_s
        self._sleep = sleep
        self._dirty: set[int] = set()
        self._under_way: asyncio.Task[bool] | None = None
        self._next: asyncio.Task[bool] | None = None
        self._timer: asyncio.Task[None] | None = None
        self.on_failure: Callable[[set[int]], None] = lambda numbers: None
        """Called with the segments of a failed flush."""
        segments.on_durable = lambda segment: self._dirty.discard(segment.number)

    @property
    def flushes_each_write(self) -> bool:
        """True if writes are answered only once durable."""
        return not self._interval_s

    def note_written(self, segment: Segment) -> None:
        """Notes that the segment has unflushed writes."""
        self._dirty.add(segment.number)
        if self._timer is None and not self.flushes_each_write:
            self._timer = asyncio.create_task(self._flush_later())

    async def flush(self) -> bool:
        """Flushes, and returns True if everything written so far is durable. If not, the disk has failed. The next
        flush tries again and trusts a success: if that is wrong, the objects are missed, or found damaged."""
        if not self._dirty and self._under_way is None:
            return True
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._under_way))
        return await asyncio.shield(self._next)

    async def close(self) -> None:
        """Waits for flushes in flight. Starts none, because sealed segments are durable."""
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.wait([self._timer])
        while running := {task for task in (self._under_way, self._next) if task is not None}:
            await asyncio.wait(running)

    def validate(self) -> None:
        """Asserts that segments with unflushed writes are in the log and have open files."""
        assert self._dirty <= set(self._segments.files) | {0}

    async def _run(self, former: asyncio.Task[bool] | None) -> bool:
        if former is not None:
            await asyncio.wait([former])
        self._under_way, self._next = self._next, None
        numbers, self._dirty = self._dirty, set()
        try:
            flushed = await self._segments.sync(numbers)
        finally:
            self._under_way = None
        if not flushed:
            self._dirty |= numbers
            self.on_failure(numbers)
        return flushed

    async def _flush_later(self) -> None:
        """Flushes once after the interval. Later writes start the next interval."""
        try:
            await self._sleep(self._interval_s)
            self._timer = None
            await self.flush()
        except Exception:  # nobody awaits this task, so an error would go unnoticed
            logger.exception("the SSD tier's writes are not flushed: this is a bug")
