"""When writes become durable: at the latest so long after they were made, and whenever somebody depends on it.

Its rule: a flush covers all that had landed when it began, and whoever asks for one waits for a flush that begins
afterwards, together with all others who ask meanwhile. Knows neither objects nor what depends on them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.disk.base import Sleep
from kvstore.disk.log import Segment
from kvstore.disk.segments import Segments

logger = logging.getLogger(__name__)


class Flusher:
    """Belongs to one event loop. `interval_s` 0 = every write is flushed before it is answered."""

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
