"""The SSD tier: implements `DiskTier` over one folder of segment files. Connects the parts and monitors the disk."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from moonserve.kvstore.disk.base import (
    PAGE,
    DiskObject,
    DiskRead,
    DiskUsage,
    DiskWrite,
    Health,
    HealthChanged,
    Moved,
    Place,
    Sleep,
)
from moonserve.kvstore.disk.compaction import Compactor
from moonserve.kvstore.disk.health import Clock, DiskHealth, HangTracker
from moonserve.kvstore.disk.io.buffers import AlignedScratch
from moonserve.kvstore.disk.io.folder import Folder
from moonserve.kvstore.disk.io.format import MAX_RECORD_BYTES, Tombstone, extent_pages
from moonserve.kvstore.disk.io.object_io import ObjectIo
from moonserve.kvstore.disk.io.segment_file import FileCalls
from moonserve.kvstore.disk.io.threads import IoThreads
from moonserve.kvstore.disk.io.uring import Ring
from moonserve.kvstore.disk.log_state import SegmentLog
from moonserve.kvstore.disk.reader import Reader
from moonserve.kvstore.disk.recovery import PinChanges, Recovery, SegmentScanner
from moonserve.kvstore.disk.segment_lifecycle import Flusher, OpenSegments
from moonserve.kvstore.disk.writer import Writer
from moonserve.protocol.errors import ConfigError

MIN_SEGMENTS = 4
"""One for writing, one for compaction, one for space lost at segment ends, and one for objects."""
_LARGEST_SEGMENT = 256 * 2**20
_SMALLEST_SEGMENT = 32 * 2**20
"""Except with a small capacity: the largest object must fit."""
_CHECKS_PER_LIMIT = 4
_SEGMENTS = 32
"""Desired number of segments, within the limits on their size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    """Options of a folder. Only `key_file` must stay the same over restarts."""

    segment_bytes: int | None = None  # None = derived from the capacity
    # 32 random reads of 64 KiB take half as long as with 8 threads, and a thread is cheap.
    num_threads: int = 16
    key_file: Path | None = None  # None = not encrypted
    ring: bool = True  # use io_uring if available
    sync_interval_s: float = 1.0  # 0 = writes are durable on return
    check_every_s: float = 10.0
    time_limit_s: float = 30.0  # for one system call; longer than a disk's own retries
    clock: Clock = monotonic
    calls: FileCalls = field(default_factory=FileCalls)
    sleep: Sleep = asyncio.sleep


class SsdTier:
    """Implements `DiskTier`. Belongs to the event loop that opened it."""

    @classmethod
    async def open(
        cls,
        folder: Path,
        capacity: int,
        options: DiskOptions,
        moved: Moved,
        health_changed: HealthChanged,
    ) -> "SsdTier":
        """Opens a folder. Raises ConfigError if it is locked, foreign, or encrypted differently."""
        segment_bytes = options.segment_bytes or _segment_bytes(capacity)
        if segment_bytes % PAGE or capacity < MIN_SEGMENTS * segment_bytes:
            raise ConfigError(
                f"SSD capacity {capacity} must be at least {MIN_SEGMENTS} segments"
                f" of {segment_bytes} bytes, which are multiples of {PAGE}"
            )
        scratch, waits = AlignedScratch(), HangTracker(options.clock)
        opened = await asyncio.to_thread(
            Folder,
            folder,
            options.key_file,
            calls=options.calls,
            scratch=scratch,
            waits=waits,
        )
        log = SegmentLog(capacity, segment_bytes)
        return cls(opened, log, options, scratch, waits, moved, health_changed)

    def __init__(
        self,
        folder: Folder,
        log: SegmentLog,
        options: DiskOptions,
        scratch: AlignedScratch,
        waits: HangTracker,
        moved: Moved,
        health_changed: HealthChanged,
    ) -> None:
        """Use `open`."""
        self.counters: Counter[str] = Counter()
        self._folder = folder
        self._log = log
        self._options = options
        self._scratch = scratch
        self._waits = waits
        self._health = DiskHealth(health_changed, self.counters)
        self._threads = IoThreads(options.num_threads, "ssd")
        self._segments = OpenSegments(log, folder, self._threads, scratch, self._health, self.counters)
        io = ObjectIo(folder, scratch)
        self._scanner = SegmentScanner(folder, io, scratch)
        # Decryption takes too long for the event loop, so encrypted folders use threads.
        by_ring = options.ring and folder.cipher is None
        self._ring = Ring.opened(waits) if by_ring else None
        self._reader = Reader(self._segments, io, self._ring)
        self._flusher = Flusher(self._segments, options.sync_interval_s, options.sleep)
        self._writer = Writer(self._segments, self._flusher, io, self._ring)
        self._pins = PinChanges()
        self._compactor = Compactor(
            self._segments,
            self._scanner,
            self._reader,
            self._writer,
            self._flusher,
            scratch,
            moved,
            self._pins,
        )
        self._writer.space_is_coming = self._compactor.wake_if_useful
        self._segments.on_sealed = self._compactor.wake
        self._recovered = False
        self._closed = False
        self._watch: asyncio.Task[None] | None = None
        self._limit = asyncio.create_task(self._watch_for_hangs())

    @property
    def health(self) -> Health:
        return self._health.current

    @property
    def live_limit(self) -> int:
        return self._log.live_limit

    def space(self, length: int) -> int:
        return extent_pages(length) * PAGE

    def takes(self, length: int) -> bool:
        return self._log.fits_at_all(extent_pages(length), MAX_RECORD_BYTES)

    def usage(self) -> DiskUsage:
        return self._log.usage()

    async def recover(self, progress: Callable[[float], None]) -> AsyncIterator[list[tuple[DiskObject, Place]]]:
        assert not self._recovered, "a folder is recovered once"
        recovery = Recovery(self._folder, self._segments, self._scanner, self._pins)
        async with contextlib.aclosing(recovery.run(progress)) as found:
            async for piece in found:
                yield piece
        self._compactor.add_tombstones(recovery.uncovered)
        await self._threads.call(self._drop_spares)
        self._recovered = True
        self._watch = asyncio.create_task(self._check_periodically())
        self._compactor.wake()

    async def write(self, writes: Sequence[DiskWrite]) -> list[Place | None]:
        assert self._recovered, "recover first"
        return await self._writer.write(writes)

    async def flush(self) -> bool:
        """Flushes, and returns True if everything written before is durable."""
        return await self._flusher.flush()

    async def read(self, reads: Sequence[DiskRead]) -> list[bool]:
        return await self._reader.read(reads)

    def release(self, place: Place) -> None:
        died = self._log.release(place)
        if died and self._recovered:  # during recovery its segment is still in use
            self._compactor.wake()

    async def forget(self, objects: Sequence[DiskObject]) -> bool:
        return await self._writer.forget([Tombstone(each.key, each.generation) for each in objects])

    async def repin(self, changes: Sequence[DiskObject]) -> None:
        changed = [Tombstone(each.key, each.generation, pin=each.pin) for each in changes]
        for change in changed:
            self._pins.note(change)
        await self._writer.forget(changed)

    async def check(self) -> None:
        """Checks if the folder still exists, and if a failed disk is well again."""
        files = list(self._segments.files.values())
        with contextlib.ExitStack() as in_use:
            for file in files:
                in_use.enter_context(file)
            try:
                await self._threads.call(lambda: self._folder.check_readable(files))
            except OSError as error:
                self._health.set_health(Health.FAILED, f"the folder cannot be read: {error}")
                return
        if self._health.current is not Health.GOOD:
            await self._check_writable()

    async def _check_writable(self) -> None:
        try:
            await self._threads.call(self._folder.check_writable)
        except OSError as error:
            self._health.set_health(Health.READ_ONLY, f"the disk cannot be written to: {error}")
            return
        self._health.set_health(Health.GOOD, "the disk answers again")
        await self._writer.write_queued_tombstones()
        self._compactor.wake()

    def check_for_hang(self) -> None:
        """Marks a disk that has not answered for too long as failed, and reports that to waiting callers.

        Reads directly into their caller's memory wait on, since the disk may still write there; `close` ends their wait
        too.
        """
        if not self._hangs():
            return
        self._health.report_hang(self._longest_wait_s())
        self._threads.give_up(everything=self._closed)
        if self._ring is not None:
            self._ring.give_up(everything=self._closed)
        self._writer.space_changed()

    def _hangs(self) -> bool:
        return self._longest_wait_s() > self._options.time_limit_s

    def _longest_wait_s(self) -> float:
        in_ring = 0.0 if self._ring is None else self._ring.longest_s()
        return max(self._waits.longest_s(), in_ring)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.check_for_hang()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await self._compactor.close()
        await self._writer.close()
        await self._flusher.close()
        await self._segments.close()
        self._limit.cancel()
        await asyncio.wait([self._limit])
        if not self._hangs():
            await asyncio.to_thread(self._threads.close)
        if self._ring is not None:
            self._ring.close()
        self._folder.close()

    async def _watch_for_hangs(self) -> None:
        while True:
            await self._options.sleep(self._options.time_limit_s / _CHECKS_PER_LIMIT)
            self.check_for_hang()

    async def _check_periodically(self) -> None:
        while True:
            await self._options.sleep(self._options.check_every_s)
            await self.check()

    def _drop_spares(self) -> None:
        with contextlib.suppress(OSError):  # spare files only take space
            keep = max(self._log.free_segments, 0)
            self._folder.drop_spares(keep=keep, nbytes=self._log.segment_pages * PAGE)


def _segment_bytes(capacity: int) -> int:
    wanted = min(max(capacity // _SEGMENTS, _SMALLEST_SEGMENT), _LARGEST_SEGMENT)
    return max(min(wanted, capacity // (2 * MIN_SEGMENTS)) // PAGE * PAGE, 2 * PAGE)
