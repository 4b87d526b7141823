"""Reads objects into memory: adjacent objects in one run, several runs in parallel. Belongs to one event loop.

Small runs use the ring if there is one. Runs that fail there are repeated by a thread, which reports the reason.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

from moonserve.kvstore.disk.base import PAGE, DiskRead
from moonserve.kvstore.disk.health import DiskOperation
from moonserve.kvstore.disk.io.buffers import OutOfPages, RingPages
from moonserve.kvstore.disk.io.format import extent_pages, segment_of
from moonserve.kvstore.disk.io.object_io import ObjectIo, RunBuffers
from moonserve.kvstore.disk.io.segment_file import SegmentFile
from moonserve.kvstore.disk.io.threads import OwnedResult
from moonserve.kvstore.disk.io.uring import Flight, Ring, run_of
from moonserve.kvstore.disk.segment_lifecycle import OpenSegments
from moonserve.kvstore.disk.write_group import run_limit

_VERIFIED_IN_LOOP_BYTES = 5 * 2**18
"""Most bytes verified in the event loop at once; 1 MB is hashed in 60 µs."""


class FlightResources:
    """Resources of a flight, released once both the kernel and the reader are done with them."""

    __slots__ = ("_files", "_num_users", "_pages")

    def __init__(self, files: Sequence[SegmentFile], pages: RingPages) -> None:
        self._files = files
        self._pages = pages
        self._num_users = 2
        for file in files:
            file.hold()

    def done(self) -> None:
        self._num_users -= 1
        if not self._num_users:
            for file in self._files:
                file.release()
            self._pages.give_back()


class Reader:
    def __init__(self, segments: OpenSegments, io: ObjectIo, ring: Ring | None) -> None:
        self._segments = segments
        self._io = io
        self._ring = ring

    async def read(self, reads: Sequence[DiskRead]) -> list[bool]:
        """Reads objects. Returns True for each that is in its memory, False if unreadable or no longer at its place."""
        results = [False] * len(reads)
        runs = list(self._runs(reads))
        if runs and self._ring is not None:
            runs = await self._read_by_ring(self._ring, reads, runs, results)
        if not runs:
            return results
        failed = await self._read_runs(reads, runs, results)
        # A bad sector must not cost its neighbours in the run.
        again = [[index] for run in failed if len(run) > 1 for index in run]
        await self._read_runs(reads, again, results)
        return results

    async def _read_by_ring(
        self,
        ring: Ring,
        reads: Sequence[DiskRead],
        runs: list[list[int]],
        results: list[bool],
    ) -> list[list[int]]:
        """Records in `results` which objects arrived. Returns the runs that the ring did not read."""
        if not self._segments.health.may_read():
            return []
        files = [self._segments.files[segment_of(reads[run[0]].place)] for run in runs]
        pages = ring.pages()
        landings = self._aimed(reads, runs, pages)
        asked = [
            run_of(file.fileno(), landing.page, landing.buffers, landing.num_pages * PAGE)
            for file, landing in zip(files, landings, strict=False)  # no landings if there are too few pages
        ]
        if not asked or not ring.takes(asked):
            pages.give_back()
            return runs
        lent = FlightResources(files, pages)
        answer: OwnedResult[Flight] = OwnedResult()
        direct = any(arrival.direct for landing in landings for arrival in landing.arrivals)
        ring.submit(
            DiskOperation.READ, asked, on_done=answer.set_result, on_released=lent.done, waits_for_release=direct
        )
        try:
            flight = await answer.wait()
            if flight.given_up:
                return []
            if sum([run.nbytes for run in asked]) <= _VERIFIED_IN_LOOP_BYTES:
                outcomes = [
                    self._io.verify_run(landing) if flight.is_whole(index) else None
                    for index, landing in enumerate(landings)
                ]
            else:  # hashing would block the event loop
                outcomes = await self._verified_by_threads(flight, landings)
        finally:
            lent.done()
        unread = []
        for run, outcome in zip(runs, outcomes, strict=True):
            if outcome is None:
                unread.append(run)
            else:
                self._note(reads, run, outcome, results)
        return unread

    def _aimed(self, reads: Sequence[DiskRead], runs: Sequence[list[int]], pages: RingPages) -> list[RunBuffers]:
        """Returns the buffers of each run, or an empty list if there are too few pages."""
        try:
            return [self._io.buffers_for([reads[index] for index in run], pages.take) for run in runs]
        except OutOfPages:
            return []

    async def _verified_by_threads(self, flight: Flight, landings: Sequence[RunBuffers]) -> list[list[bool] | None]:
        """Returns for each run which objects are valid; None for a run that was not fully read."""
        whole = [index for index in range(len(landings)) if flight.is_whole(index)]
        jobs = [partial(self._io.verify_run, landings[index]) for index in whole]
        outcomes: list[list[bool] | None] = [None] * len(landings)
        given = await self._segments.threads.run(jobs, waits_for_release=True)
        for index, outcome in zip(whole, given, strict=True):
            if isinstance(outcome, OSError):  # given up when the tier closes
                outcome = [False] * len(landings[index].arrivals)
            outcomes[index] = outcome
        return outcomes

    async def _read_runs(
        self, reads: Sequence[DiskRead], runs: Sequence[list[int]], results: list[bool]
    ) -> list[list[int]]:
        """Records in `results` which objects arrived. Returns the runs that ended with an error.

        A segment that has been retired since the request gives no objects.
        """
        if not self._segments.health.may_read():
            return []
        runs = [run for run in runs if self._possible(reads[run[0]])]
        with contextlib.ExitStack() as in_use:
            jobs = []
            for run in runs:
                file = self._segments.files[segment_of(reads[run[0]].place)]
                in_use.enter_context(file)
                jobs.append(partial(self._io.read, file, [reads[index] for index in run]))
            outcomes = await self._segments.threads.run(jobs, waits_for_release=True)
        failed = []
        for run, outcome in zip(runs, outcomes, strict=True):
            if isinstance(outcome, OSError):
                self._segments.report_error(DiskOperation.READ, outcome)
                failed.append(run)
            else:
                self._note(reads, run, outcome, results)
        return failed

    def _note(
        self,
        reads: Sequence[DiskRead],
        run: Sequence[int],
        outcome: Sequence[bool],
        results: list[bool],
    ) -> None:
        self._segments.health.read_succeeded()
        counters = self._segments.counters
        for index, good in zip(run, outcome, strict=True):
            results[index] = good
            if good:
                counters["objects_read"] += 1
                counters["bytes_read"] += reads[index].object.length
            else:
                counters["read_mismatches"] += 1

    def _runs(self, reads: Sequence[DiskRead]) -> Iterator[list[int]]:
        """Yields the indexes of reads that are adjacent on disk, without invalid reads."""
        if len(reads) == 1:
            if self._possible(reads[0]):
                yield [0]
            return
        nbytes = sum(extent_pages(read.object.length) for read in reads) * PAGE
        limit = run_limit(nbytes, self._segments.threads.num_threads) // PAGE
        run: list[int] = []
        begin = end = -1
        for index in sorted(range(len(reads)), key=lambda index: reads[index].place):
            read = reads[index]
            if not self._possible(read):
                continue
            num_pages = extent_pages(read.object.length)
            if run and (read.place != end or read.place + num_pages > begin + limit):
                yield run
                run = []
            if not run:
                begin = read.place
            run.append(index)
            end = read.place + num_pages
        if run:
            yield run

    def _possible(self, read: DiskRead) -> bool:
        known = segment_of(read.place) in self._segments.files
        return known and len(read.memory) == read.object.length
