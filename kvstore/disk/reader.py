"""Objects from their places into memory: neighbours together, several runs at once. Belongs to one event loop.

Small runs go through the ring where there is one. What fails there is asked for again by a thread, which knows why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

from kvstore.disk.base import PAGE, DiskRead
from kvstore.disk.format import extent_pages, segment_of
from kvstore.disk.group import run_limit
from kvstore.disk.health import Doing
from kvstore.disk.memory import Scratch
from kvstore.disk.object_io import Landing, ObjectIo, pages_to_read
from kvstore.disk.ring import Flight, Ring, Run
from kvstore.disk.segments import Segments
from kvstore.disk.threads import Answer
from kvstore.disk.uring import Opcode


class Reader:
    def __init__(
        self, segments: Segments, io: ObjectIo, scratch: Scratch, ring: Ring | None
    ) -> None:
        self._segments = segments
        self._io = io
        self._scratch = scratch
        self._ring = ring

    async def read(self, reads: Sequence[DiskRead]) -> list[bool]:
        """Whether each object now lies in its memory. An unreadable one is False, like one that has moved on."""
        results = [False] * len(reads)
        runs = list(self._runs(reads))
        if runs and self._ring is not None:
            runs = await self._read_by_ring(self._ring, reads, runs, results)
        if not runs:
            return results
        failed = await self._read_runs(reads, runs, results)
        # One bad sector should not cost the neighbours that were read along with it.
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
        """Notes down in `results` what arrived. Returns the runs that the ring did not read."""
        if not self._segments.health.may_read():
            return []
        files = [self._segments.files[segment_of(reads[run[0]].place)] for run in runs]
        memory = self._scratch.take(pages_to_read(reads) * PAGE)
        landings = self._aimed(reads, runs, memoryview(memory))
        asked = [
            Run(file.fileno(), landing.page, landing.buffers, landing.num_pages * PAGE)
            for file, landing in zip(files, landings, strict=True)
        ]

        def over() -> None:  # if the disk hangs, once it has really let go of them
            for file in files:
                file.let_go()
            self._scratch.give_back(memory)

        for file in files:
            file.hold()
        if not ring.takes(asked):
            over()
            return runs
        answer: Answer[list[list[int]]] = Answer()

        def landed(flight: Flight) -> None:
            try:
                answer.give(self._taken(flight, reads, runs, landings, results))
            except Exception as error:  # raised where it is waited for
                answer.fail(error)

        direct = any(any(landing.direct) for landing in landings)
        ring.begin(Opcode.READV, asked, landed=landed, over=over, until_over=direct)
        return await answer.wait()

    def _aimed(
        self, reads: Sequence[DiskRead], runs: Sequence[list[int]], scratch: memoryview
    ) -> list[Landing]:
        landings = []
        at = 0
        for run in runs:
            landing = self._io.aimed([reads[index] for index in run], scratch[at:])
            landings.append(landing)
            at += landing.num_pages * PAGE
        return landings

    def _taken(
        self,
        flight: Flight,
        reads: Sequence[DiskRead],
        runs: Sequence[list[int]],
        landings: Sequence[Landing],
        results: list[bool],
    ) -> list[list[int]]:
        """The runs that a thread has to read: all but those that have landed, unless they were given up."""
        if flight.given_up:
            return []
        unread = []
        for number, (run, landing) in enumerate(zip(runs, landings, strict=True)):
            if flight.is_whole(number):
                segment = segment_of(landing.reads[0].place)
                outcome = self._io.arrived(segment, landing, flight.results[number])
                self._note(reads, run, outcome, results)
            else:
                unread.append(run)
        return unread

    async def _read_runs(
        self, reads: Sequence[DiskRead], runs: Sequence[list[int]], results: list[bool]
    ) -> list[list[int]]:
        """Notes down in `results` what arrived. Returns the runs that ended with an error."""
        if not self._segments.health.may_read():
            return []
        with contextlib.ExitStack() as in_use:
            jobs = []
            for run in runs:
                file = self._segments.files[segment_of(reads[run[0]].place)]
                in_use.enter_context(file)
                jobs.append(partial(self._io.read, file, [reads[index] for index in run]))
            outcomes = await self._segments.threads.run(jobs, until_over=True)
        failed = []
        for run, outcome in zip(runs, outcomes, strict=True):
            if isinstance(outcome, OSError):
                self._segments.failed(Doing.READ, outcome)
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
        self._segments.health.has_read()
        counters = self._segments.counters
        for index, good in zip(run, outcome, strict=True):
            results[index] = good
            if good:
                counters["objects_read"] += 1
                counters["bytes_read"] += reads[index].object.length
            else:
                counters["read_mismatches"] += 1

    def _runs(self, reads: Sequence[DiskRead]) -> Iterator[list[int]]:
        """Indexes of neighbours on disk. Reads that cannot be right are in none."""
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
