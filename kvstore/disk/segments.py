"""Segments as files and as state together: begun, sealed, made durable, retired.

Its rule: a footer is written behind a log that is durable, so what it lists is there whenever the footer is. Belongs to
one event loop; the disk's errors become health here and go no further.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import ExitStack

from kvstore.disk.base import PAGE, Sleep
from kvstore.disk.files import SegmentFile
from kvstore.disk.folder import Folder
from kvstore.disk.format import encode_footer, footer_pages
from kvstore.disk.health import DiskHealth, Doing
from kvstore.disk.log import Log, Segment
from kvstore.disk.memory import Scratch
from kvstore.disk.threads import IoThreads
from protocol.held_tasks import HeldTasks

logger = logging.getLogger(__name__)


class Segments:
    """The open segments of a folder."""

    def __init__(
        self,
        log: Log,
        folder: Folder,
        threads: IoThreads,
        scratch: Scratch,
        health: DiskHealth,
        counters: Counter[str],
    ) -> None:
        self.log = log
        self.files: dict[int, SegmentFile] = {}
        self.counters = counters
        self.health = health
        self.threads = threads
        self.unnamed: set[int] = set()
        """Files whose names are not durable yet."""
        self._folder = folder
        self._scratch = scratch
        self._prepared: asyncio.Task[SegmentFile | None] | None = None
        self._footers = HeldTasks()
        self._footed: set[int] = set()
        """Segments whose footers are not durable yet."""
        self.is_durable: Callable[[Segment], None] = lambda segment: None
        """Called when all of a sealed segment is durable but for its footer."""
        self.is_sealed: Callable[[], None] = lambda: None
        """Called when a segment is done with, footer or not."""

    def may_write(self) -> bool:
        return self.health.may_write(asyncio.get_running_loop().time())

    def failed(self, doing: Doing, error: OSError) -> None:
        self.health.failed(doing, error, asyncio.get_running_loop().time())

    def prepare(self) -> None:
        """The next segment's file is there when `begin` wants it."""
        if self._prepared is None and self.log.may_open(urgent=False):
            self._prepared = asyncio.create_task(self._prepare())

    async def begin(self) -> bool:
        """Opens the next segment for appending; False when the disk does not let it."""
        file = await self._taken()
        if file is None:
            try:
                file = await self.threads.call(self._create)
            except OSError as error:
                self.failed(Doing.WRITE, error)
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
        except OSError as error:  # `begin` tries again, and says so
            logger.debug("the next segment could not be prepared: %s", error)
            return None

    async def _taken(self) -> SegmentFile | None:
        """What was prepared."""
        if self._prepared is None:
            return None
        prepared, self._prepared = self._prepared, None
        return await prepared

    def seal(self, landed: Callable[[Segment], Awaitable[None]]) -> None:
        """The active segment, if there is one, takes nothing more and gets its footer once everything has `landed`.
        Nobody need wait for it."""
        if self.log.active is not None:
            segment = self.log.seal()
            segment.unanswered += 1
            self._footers.start(self._finish(segment, landed))

    async def sealed(self) -> bool:
        """Waits until a footer is written; False when none is on its way."""
        if self._footers:
            await asyncio.wait(list(self._footers), return_when=asyncio.FIRST_COMPLETED)
            return True
        return False

    async def sync(self, numbers: Collection[int]) -> bool:
        """Whether what has landed in these segments is durable now, and their names with it. Retired ones are."""
        files = [self.files[number] for number in numbers if number in self.files]
        names = self.unnamed.intersection(numbers)
        jobs: list[Callable[[], None]] = [file.sync for file in files]
        if names:
            jobs.append(self._folder.sync_names)
        in_use = ExitStack()
        for file in files:
            in_use.enter_context(file)
        outcomes = await self.threads.run(jobs, over=in_use.close)
        errors = [outcome for outcome in outcomes if outcome is not None]
        for error in errors:
            self.failed(Doing.WRITE, error)
        if not errors:
            self.unnamed -= names
        return not errors

    async def write_footer(self, segment: Segment) -> None:
        """Without it the segment is scanned at the next start, and no more: it is durable when the tier is closed."""
        file = self.files[segment.number]
        in_use = ExitStack()
        in_use.enter_context(file)
        try:
            await self.threads.call(lambda: self._write_footer(file, segment), over=in_use.close)
        except OSError as error:
            self.failed(Doing.WRITE, error)
        else:
            self._footed.add(segment.number)
        segment.footer = footer_pages(len(segment.records), len(segment.tombstones))
        segment.forget_footer()

    async def _finish(self, segment: Segment, landed: Callable[[Segment], Awaitable[None]]) -> None:
        try:
            await landed(segment)
            if self.health.may_read() and await self.sync({segment.number}):
                self.is_durable(segment)
                await self.write_footer(segment)
        except Exception:  # a held task: raised, nobody would see it
            logger.exception("a segment of the SSD tier was not sealed: this is a bug")
        finally:
            segment.forget_footer()
            segment.unanswered -= 1
            self.is_sealed()

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
        """Durably gives up a segment without live objects; its file is written again later."""
        file = self.files.pop(segment.number)
        self.unnamed.discard(segment.number)
        self._footed.discard(segment.number)
        await file.unused()
        try:
            await self.threads.call(lambda: self._folder.recycle(segment.number))
        except OSError as error:
            self.files[segment.number] = file
            self.failed(Doing.WRITE, error)
            return False
        file.close()
        self.log.retire(segment)
        return True

    async def close(self) -> None:
        """What hangs in a file that does not answer stays open: its number may not become another file's."""
        await self._drop_prepared()
        if self.health.may_read():
            await self.sync(self._footed)
        for file in self.files.values():
            if self.health.may_read() or not file.in_use:
                await file.unused()
                file.close()
        self.files.clear()

    async def _drop_prepared(self) -> None:
        """Nothing is in it: its file is a spare one again."""
        file = await self._taken()
        if file is not None:
            with contextlib.suppress(OSError):  # then the next start finds an empty segment
                await self.threads.call(lambda: self._folder.recycle(file.number))
            file.close()


class Flusher:
    """Makes writes durable: within `interval_s` of when they were made, and when somebody depends on it.

    Belongs to one event loop. `interval_s` 0 = every write is flushed before it is answered.
    """

    def __init__(self, segments: Segments, interval_s: float, sleep: Sleep) -> None:
        self._segments = segments
        self._interval_s = interval_s
        self._sleep = sleep
        self._dirty: set[int] = set()
        self._under_way: asyncio.Task[bool] | None = None
        self._next: asyncio.Task[bool] | None = None
        self._timer: asyncio.Task[None] | None = None
        self.failed: Callable[[set[int]], None] = lambda numbers: None
        """Called with the segments of a flush that failed."""
        segments.is_durable = self._is_durable

    @property
    def at_once(self) -> bool:
        """Whether no write may be answered before it is durable."""
        return not self._interval_s

    def landed(self, segment: Segment) -> None:
        """Something was written there."""
        self._dirty.add(segment.number)
        if self._timer is None and not self.at_once:
            self._timer = asyncio.create_task(self._flush_later())

    async def flush(self) -> bool:
        """Whether all that had landed is durable now. Where it is not, the disk has failed; it is tried again with the
        next flush, and a success is then believed: were it wrong, the objects would be missed, or found damaged."""
        if not self._dirty and self._under_way is None:
            return True
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._under_way))
        return await asyncio.shield(self._next)

    async def close(self) -> None:
        """Flushes nothing: a segment that is sealed is durable."""
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.wait([self._timer])
        while running := {task for task in (self._under_way, self._next) if task is not None}:
            await asyncio.wait(running)

    def validate(self) -> None:
        """What is not durable is known: a segment of the log, whose file is open."""
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
            self.failed(numbers)
        return flushed

    async def _flush_later(self) -> None:
        """Once; what lands afterwards begins the next interval."""
        try:
            await self._sleep(self._interval_s)
            self._timer = None
            await self.flush()
        except Exception:  # a held task: raised, nobody would see it
            logger.exception("the SSD tier's writes are not flushed: this is a bug")

    def _is_durable(self, segment: Segment) -> None:
        self._dirty.discard(segment.number)
