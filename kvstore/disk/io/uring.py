"""Reads and writes through io_uring, submitted from the event loop, which the kernel wakes on completion.

A thread costs two wake-ups per operation and waits for the interpreter's lock: more than reading 64 KiB from a good
disk. Needs the package `liburing` (extra `uring`) and a kernel that allows io_uring; otherwise `opened` returns None.
Memory is kept until the kernel is done with it, even if the caller has given up; direct transfers use `CachedViews`.
An unexpected outcome is not an error here: a thread repeats the operation and reports the reason. Does not know what it
moves.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moonserve.kvstore.disk.base import PAGE
from moonserve.kvstore.disk.health import DiskOperation, HangTracker
from moonserve.kvstore.disk.io.buffers import CachedViews, PagePool, RingPages

logger = logging.getLogger(__name__)

NUM_SLOTS = 64
"""Operations in flight; further ones go to the threads."""
MAX_BUFFERS = 1024
"""Buffers per operation: IOV_MAX of Linux."""
IN_LOOP_BYTES = 5 * 2**20
"""Most bytes started in the event loop, which takes 40 µs per MB. Larger flights are started by kernel threads, which
take a fifth more CPU time."""
_AGAIN_S = 0.01
"""Seconds before retrying when the kernel had no memory for an operation."""


class IoRun(NamedTuple):
    """Buffers for adjacent pages of a file, to write or to read."""

    fd: int
    page: int
    buffers: Sequence[memoryview]
    nbytes: int


@dataclass(slots=True, eq=False)
class Flight:
    """Runs submitted together."""

    runs: Sequence[IoRun]
    begun_at: float
    on_done: Callable[[Flight], None]
    """Called once: when all runs have ended or were given up."""
    on_released: Callable[[], None]
    """Called once, when the kernel is done with the memory."""
    waits_for_release: bool
    """True if the caller must wait for `on_released`, because the kernel writes to the caller's memory."""
    left: int
    failed: tuple[int, ...] = ()
    """Indexes of runs that were not fully transferred."""
    given_up: bool = False

    def is_whole(self, index: int) -> bool:
        return index not in self.failed

    def give_up(self) -> None:
        """Reports all runs as failed to the caller."""
        if not self.given_up:
            self.given_up = True
            self.failed = tuple(range(len(self.runs)))
            self.report()

    def report(self) -> None:
        """Calls and drops `on_done`, which often refers back to this flight: dropping it avoids a reference cycle."""
        on_done, self.on_done = self.on_done, lambda flight: None
        on_done(self)


_PROBE = """
import sys
sys.path[:0] = sys.argv[1:]
import liburing
ring = liburing.Ring()
try:
    liburing.io_uring_queue_init(1, ring)
except OSError:
    pass
"""


@functools.cache
def _runs_here(folder: str) -> bool:
    """True if liburing in `folder` runs on this CPU. Its published wheel is built for newer CPUs, where any call can
    end the process by SIGILL, so a child process tries it first (about 25 ms)."""
    command = [sys.executable, "-I", "-S", "-c", _PROBE, folder]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError as error:
        logger.warning("liburing cannot be tried: %s", error)
        return False


def _liburing() -> Any:
    """Returns the module, or None if it is missing or does not run here."""
    if (loaded := sys.modules.get("liburing")) is not None:
        return loaded
    spec = importlib.util.find_spec("liburing")
    if spec is None or not spec.submodule_search_locations:
        logger.info("no liburing here (extra `uring`): threads access the disk")
        return None
    if not _runs_here(str(Path(spec.submodule_search_locations[0]).parent)):
        logger.warning("liburing does not run on this processor: threads access the disk")
        return None
    return importlib.import_module("liburing")


class Ring:
    """An io_uring. Belongs to the event loop in which it was opened."""

    @classmethod
    def opened(cls, waits: HangTracker, memory: memoryview) -> Ring | None:
        """Opens a ring; None if io_uring is not available. `memory` must outlast the ring; data in it is not copied."""
        uring = _liburing()
        if uring is None:
            return None
        ring = uring.Ring()
        try:
            uring.io_uring_queue_init(NUM_SLOTS, ring)
        except OSError as error:  # many containers forbid it
            logger.info("no io_uring here (%s): threads access the disk", error)
            return None
        return cls(uring, ring, waits, CachedViews(memory))

    def __init__(self, uring: Any, ring: Any, waits: HangTracker, views: CachedViews) -> None:
        """Use `opened`."""
        self._uring = uring
        self._ring = ring
        self._waits = waits
        self._views = views
        self._pool = PagePool()
        self._entry = uring.Cqe()
        self._free = list(range(1, NUM_SLOTS + 1))  # liburing refuses zero
        self._under_way: dict[int, tuple[Flight, int]] = {}
        """Flight and index of the run, by slot."""
        self._vectors: dict[int, Any] = {}
        """I/O vectors by slot. The kernel may read them later than they are submitted."""
        self._again: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ring.ring_fd, self._ended)

    @property
    def num_in_flight(self) -> int:
        return len(self._under_way)

    def pages(self) -> RingPages:
        """Returns memory for operations."""
        return RingPages(self._pool, self._views)

    def takes(self, runs: Sequence[IoRun]) -> bool:
        """True if the runs can start now."""
        if len(runs) > len(self._free):
            return False
        most = max([len(run.buffers) for run in runs])
        return most <= MAX_BUFFERS

    def submit(
        self,
        doing: DiskOperation,
        runs: Sequence[IoRun],
        *,
        on_done: Callable[[Flight], None],
        on_released: Callable[[], None],
        waits_for_release: bool = False,
    ) -> None:
        """Starts runs accepted by `takes`. `on_done` and `on_released` are called later from the event loop, in this
        order if the disk answers in time."""
        flight = Flight(runs, self._waits.now, on_done, on_released, waits_for_release, len(runs))
        uring, ring = self._uring, self._ring
        prepare = uring.io_uring_prep_readv if doing is DiskOperation.READ else uring.io_uring_prep_writev
        in_loop = sum([run.nbytes for run in runs]) <= IN_LOOP_BYTES
        for index, run in enumerate(runs):
            slot = self._free.pop()
            self._under_way[slot] = flight, index
            vector = self._vectors[slot] = uring.Iovec(run.buffers)
            entry = uring.io_uring_get_sqe(ring)
            prepare(entry, run.fd, vector, run.page * PAGE)
            entry.user_data = slot
            if not in_loop:
                entry.flags = uring.IOSQE_ASYNC
        self._submit()

    def longest_s(self) -> float:
        """Returns the age of the oldest operation in flight."""
        begun = [flight.begun_at for flight, _ in self._under_way.values()]
        return self._waits.now - min(begun) if begun else 0.0

    def give_up(self, *, everything: bool) -> None:
        """Reports to callers that the disk hangs. With `everything`, also to those that wait for `on_released`."""
        for flight in {flight for flight, _ in self._under_way.values()}:
            if everything or not flight.waits_for_release:
                flight.give_up()

    def close(self) -> None:
        """Closes the ring. Operations in flight are not reported."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._ring.ring_fd)
        self._uring.io_uring_queue_exit(self._ring)

    def validate(self) -> None:
        """Asserts that every slot is free or in flight, and that only operations in flight hold pages."""
        assert sorted([*self._free, *self._under_way]) == list(range(1, NUM_SLOTS + 1))
        assert self._vectors.keys() == self._under_way.keys()
        assert self._under_way or not self._pool.num_in_use
        self._views.validate()

    def _submit(self) -> None:
        try:
            self._uring.io_uring_submit(self._ring)
        except OSError as error:  # operations not started go with the next submission or after a pause
            logger.debug("io_uring accepts no operations for now: %s", error)
            self._again = self._loop.call_later(_AGAIN_S, self._submit)

    def _ended(self) -> None:
        """Handles all completed operations; there is at least one."""
        uring, ring = self._uring, self._ring
        for _ in range(uring.io_uring_cq_ready(ring)):
            uring.io_uring_peek_cqe(ring, self._entry)
            done = self._entry[0]
            try:
                nbytes = done.res
            except OSError:
                nbytes = 0
            slot = done.user_data
            uring.io_uring_cqe_seen(ring, done)
            self._note(slot, nbytes)

    def _note(self, slot: int, nbytes: int) -> None:
        flight, index = self._under_way.pop(slot)
        del self._vectors[slot]
        self._free.append(slot)
        flight.left -= 1
        if nbytes != flight.runs[index].nbytes:
            flight.failed += (index,)
        if not flight.left:
            if not flight.given_up:
                flight.report()
            flight.on_released()
