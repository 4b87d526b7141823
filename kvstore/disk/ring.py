"""Reads and writes through io_uring: submitted from the event loop, which the kernel wakes when they have ended.

A thread costs two wake-ups for each of them and waits for the interpreter's lock: more than 64 KiB from a good disk.
Needs the package `liburing` (extra `uring`) and a kernel that allows io_uring; `opened` says None without them. Its
rule: memory is kept until the kernel is done with it, whoever has given up waiting, and views that are moved are
lasting ones (`views`). An outcome that is not what was asked for is no error here: a thread asks again, and knows why.
Knows nothing of what it moves.
"""

from __future__ import annotations

import asyncio
import errno
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

from kvstore.disk.base import PAGE
from kvstore.disk.health import Doing, Waits
from kvstore.disk.memory import LastingPages, LastingViews, PagePool

logger = logging.getLogger(__name__)

NUM_SLOTS = 64
"""Operations under way at once; what comes beyond goes to the threads."""
MAX_BUFFERS = 1024
"""Of one operation: IOV_MAX of Linux."""
IN_LOOP_BYTES = 5 * 2**20
"""Begun together; more is begun by threads of the kernel, who take a fifth more of the processor. A megabyte takes the
loop 40 µs."""
_AGAIN_S = 0.01
"""When the kernel had no memory for an operation."""


class Run(NamedTuple):
    """Buffers that go to pages of a file which lie next to each other, or come from there."""

    fd: int
    page: int
    buffers: Sequence[memoryview]
    nbytes: int


@dataclass(slots=True, eq=False)
class Flight:
    """Runs that were begun together."""

    runs: Sequence[Run]
    begun_at: float
    landed: Callable[[Flight], None]
    """Called once: when all have ended, or when they are given up."""
    over: Callable[[], None]
    """Called once, when the kernel is done with their memory."""
    until_over: bool
    """Whether whoever waits has to wait until then, since the kernel writes to memory of theirs."""
    left: int
    failed: tuple[int, ...] = ()
    """Indexes of runs that did not land whole."""
    given_up: bool = False

    def is_whole(self, index: int) -> bool:
        return index not in self.failed

    def error(self) -> OSError:
        """For whoever waited in vain."""
        return OSError(errno.ETIMEDOUT, "the disk does not answer")

    def give_up(self) -> None:
        """Whoever waits is told that nothing has landed."""
        if not self.given_up:
            self.given_up = True
            self.failed = tuple(range(len(self.runs)))
            self.tell()

    def tell(self) -> None:
        """Who waits often holds this in turn: without the way back, no garbage collector is needed."""
        landed, self.landed = self.landed, _told
        landed(self)


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
    """Whether liburing in `folder` runs on this processor. Its published wheel is built for newer ones, where any call
    can end the whole process by SIGILL, so another process tries it first (about 25 ms)."""
    command = [sys.executable, "-I", "-S", "-c", _PROBE, folder]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError as error:
        logger.warning("liburing cannot be tried: %s", error)
        return False


def _liburing() -> Any:
    """The module, or None where it is missing or does not run."""
    if (loaded := sys.modules.get("liburing")) is not None:
        return loaded
    spec = importlib.util.find_spec("liburing")
    if spec is None or not spec.submodule_search_locations:
        logger.info("no liburing here (extra `uring`): the disk is asked by threads")
        return None
    if not _runs_here(str(Path(spec.submodule_search_locations[0]).parent)):
        logger.warning("liburing does not run on this processor: the disk is asked by threads")
        return None
    return importlib.import_module("liburing")


class Ring:
    """Belongs to the event loop in which it was opened."""

    @classmethod
    def opened(cls, waits: Waits, memory: memoryview) -> Ring | None:
        """None where there is no io_uring to be had. `memory` outlasts the ring: what lies there is not copied."""
        uring = _liburing()
        if uring is None:
            return None
        ring = uring.Ring()
        try:
            uring.io_uring_queue_init(NUM_SLOTS, ring)
        except OSError as error:  # many containers forbid it
            logger.info("no io_uring here (%s): the disk is asked by threads", error)
            return None
        return cls(uring, ring, waits, LastingViews(memory))

    def __init__(self, uring: Any, ring: Any, waits: Waits, views: LastingViews) -> None:
        """Use `opened`."""
        self._uring = uring
        self._ring = ring
        self._waits = waits
        self._views = views
        self._pool = PagePool()
        self._entry = uring.Cqe()
        self._free = list(range(1, NUM_SLOTS + 1))  # liburing refuses zero
        self._under_way: dict[int, tuple[Flight, int]] = {}
        """By slot, the flight and the index of its run."""
        self._vectors: dict[int, Any] = {}
        """By slot: the kernel reads them when it begins, which may be later than asked."""
        self._again: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ring.ring_fd, self._ended)

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def pages(self) -> LastingPages:
        """Memory that operations may use."""
        return LastingPages(self._pool, self._views)

    def takes(self, runs: Sequence[Run]) -> bool:
        """Whether they can begin now."""
        if len(runs) > len(self._free):
            return False
        most = max([len(run.buffers) for run in runs])
        return most <= MAX_BUFFERS

    def begin(
        self,
        doing: Doing,
        runs: Sequence[Run],
        *,
        landed: Callable[[Flight], None],
        over: Callable[[], None],
        until_over: bool = False,
    ) -> None:
        """Those that `takes` lets. `landed` and `over` are called from the event loop later, in this order if the disk
        answers in time."""
        flight = Flight(runs, self._waits.now, landed, over, until_over, len(runs))
        uring, ring = self._uring, self._ring
        prepare = uring.io_uring_prep_readv if doing is Doing.READ else uring.io_uring_prep_writev
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
        """How long the oldest operation is under way."""
        begun = [flight.begun_at for flight, _ in self._under_way.values()]
        return self._waits.now - min(begun) if begun else 0.0

    def give_up(self, *, everything: bool) -> None:
        """The disk hangs: whoever waits is told so. With `everything`, also who has to wait until it is over."""
        for flight in {flight for flight, _ in self._under_way.values()}:
            if everything or not flight.until_over:
                flight.give_up()

    def close(self) -> None:
        """What is under way is not heard of any more."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._ring.ring_fd)
        self._uring.io_uring_queue_exit(self._ring)

    def validate(self) -> None:
        """Every slot is free or under way, and nobody else holds pages."""
        assert sorted([*self._free, *self._under_way]) == list(range(1, NUM_SLOTS + 1))
        assert self._vectors.keys() == self._under_way.keys()
        assert self._under_way or not self._pool.num_in_use
        self._views.validate()

    def _submit(self) -> None:
        try:
            self._uring.io_uring_submit(self._ring)
        except OSError as error:  # what was not begun goes with the next ones, or in a while
            logger.debug("io_uring begins nothing for now: %s", error)
            self._again = self._loop.call_later(_AGAIN_S, self._submit)

    def _ended(self) -> None:
        """All that have; the loop has just seen that it is one at least."""
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
                flight.tell()
            flight.over()


def _told(flight: Flight) -> None:
    """Nobody waits any more."""
