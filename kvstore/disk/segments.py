"""Segments as files and as state together: begun, sealed, retired. Belongs to one event loop; the disk's errors become
health here and go no further."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack

from kvstore.disk.base import PAGE
from kvstore.disk.files import SegmentFile
from kvstore.disk.folder import Folder
from kvstore.disk.format import encode_footer
from kvstore.disk.health import DiskHealth, Doing
from kvstore.disk.log import Log, Segment
from kvstore.disk.memory import Scratch
from kvstore.disk.threads import IoThreads


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
        self._folder = folder
        self._scratch = scratch

    def may_write(self) -> bool:
        return self.health.may_write(asyncio.get_running_loop().time())

    def failed(self, doing: Doing, error: OSError) -> None:
        self.health.failed(doing, error, asyncio.get_running_loop().time())

    async def begin(self) -> bool:
        """Opens the next segment for appending; False when the disk does not let it."""
        nbytes = self.log.segment_pages * PAGE
        try:
            file = await self.threads.call(lambda: self._folder.create(nbytes))
        except OSError as error:
            self.failed(Doing.WRITE, error)
            return False
        self.files[file.number] = file
        self.log.open(file.number)
        return True

    async def seal(self) -> None:
        """The active segment, if there is one, gets its footer."""
        if self.log.active is not None:
            segment = self.log.seal()
            if self.health.may_read():
                await self.write_footer(segment)
            else:
                segment.forget_footer()

    async def write_footer(self, segment: Segment) -> None:
        """Without it the segment is scanned at the next start, and no more."""
        file = self.files[segment.number]
        try:
            in_use = ExitStack()
            in_use.enter_context(file)
            await self.threads.call(lambda: self._write_footer(file, segment), over=in_use.close)
        except OSError as error:
            self.failed(Doing.WRITE, error)
        segment.forget_footer()

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
        file.sync()

    async def retire(self, segment: Segment) -> bool:
        """Durably gives up a segment without live objects; its file is written again later."""
        file = self.files.pop(segment.number)
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
        for file in self.files.values():
            if self.health.may_read() or not file.in_use:
                await file.unused()
                file.close()
        self.files.clear()
