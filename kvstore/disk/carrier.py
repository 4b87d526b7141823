"""Groups of writes on their way to the disk: through the ring where there is one, else by threads. Belongs to one event
loop. Knows nothing of what follows a group, nor of what is durable."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from kvstore.disk.files import SegmentFile
from kvstore.disk.group import Group, run_limit, runs
from kvstore.disk.object_io import ObjectIo, Pages
from kvstore.disk.ring import Flight, Ring, Run, Way
from kvstore.disk.segments import Segments
from kvstore.disk.views import OutOfPages
from protocol.held_tasks import HeldTasks

RUN_BYTES = 2 * 2**20
"""Of one operation in the ring, and what is left of an object: two of 1 MiB together take less of the processor."""

logger = logging.getLogger(__name__)

Landed = Callable[[Group], None]
"""Called in the event loop when a group has landed, or failed (`Group.error`)."""


class Carrier:
    def __init__(
        self,
        segments: Segments,
        io: ObjectIo,
        ring: Ring | None,
        landed: Landed,
    ) -> None:
        self._segments = segments
        self._io = io
        self._ring = ring
        self._landed = landed
        self._tasks = HeldTasks()

    def begin(self, group: Group) -> None:
        """Writes it. Of several groups that are under way none touches another's pages."""
        if self._ring is None or not self._begin_in_ring(self._ring, group):
            self._begin_in_threads(group)

    def _begin_in_ring(self, ring: Ring, group: Group) -> bool:
        file = self._segments.files[group.segment.number]
        pages = ring.pages()

        def over() -> None:  # if the disk hangs, once it has really let go of them
            file.let_go()
            pages.back()

        file.hold()
        asked = self._laid_out(file, group, pages)
        if asked is None or not ring.takes(asked):
            over()
            return False
        ring.begin(Way.WRITE, asked, landed=partial(self._ended, group), over=over)
        return True

    def _laid_out(self, file: SegmentFile, group: Group, pages: Pages) -> list[Run] | None:
        """None when there are too few pages."""
        fd = file.fileno()
        try:
            return [
                Run(fd, entries[0].page, self._io.laid_out(file.number, entries, pages), nbytes)
                for entries, nbytes in runs(group, RUN_BYTES)
            ]
        except OutOfPages:
            return None

    def _ended(self, group: Group, flight: Flight) -> None:
        if flight.given_up:
            group.error = flight.error()
        elif not all(map(flight.is_whole, range(len(flight.runs)))):
            self._begin_in_threads(group)  # the same bytes again: a thread knows why it fails
            return
        self._landed(group)

    def _begin_in_threads(self, group: Group) -> None:
        self._tasks.start(self._write(group))

    async def _write(self, group: Group) -> None:
        try:
            group.error = await self._written(group)
        except Exception:  # whoever waits for a write must be told
            logger.exception("a group of writes to the SSD tier is refused: this is a bug")
            group.error = OSError("not written")
        self._landed(group)

    async def _written(self, group: Group) -> OSError | None:
        file = self._segments.files[group.segment.number]
        threads = self._segments.threads
        limit = run_limit(group.nbytes, threads.num_threads)
        jobs = [partial(self._io.write, file, entries) for entries, _ in runs(group, limit)]
        in_use = ExitStack()
        in_use.enter_context(file)
        outcomes = await threads.run(jobs, over=in_use.close)
        return next((outcome for outcome in outcomes if outcome is not None), None)
