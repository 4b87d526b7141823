"""Reads and writes through io_uring, submitted from the event loop, which the kernel wakes on completion.

A thread costs two wake-ups per operation and waits for the interpreter's lock: more than reading 64 KiB from a good
disk. Needs a kernel that allows io_uring; otherwise `opened` returns None. Memory is kept until the kernel is done with
it, even if the caller has given up. While operations are short, the event loop is kept from sleeping.
An unexpected outcome is not an error here: a thread repeats the operation and reports the reason. Does not know what it
moves.
"""

import asyncio
import ctypes
import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moonserve.kvstore.disk.health import DiskOperation, HangTracker
from moonserve.kvstore.disk.io.buffers import PagePool, RingPages
from moonserve.kvstore.published_index import load_with_and_without_gil
from moonserve.transfer.memory.data_plane import address_of

logger = logging.getLogger(__name__)

NUM_SLOTS = 64
"""Operations in flight; further ones go to the threads."""
MAX_VECTORS = 1024
"""Pieces of memory per operation: IOV_MAX of Linux."""
IN_LOOP_BYTES = 5 * 2**20
"""Most bytes started in the event loop, which takes 40 µs per MB. Larger flights are started by kernel threads, which
take a fifth more CPU time."""
POLLED_S = 0.00015
"""Seconds for which the event loop does not sleep after a submission, if recent flights took no longer: to wake it
takes 20 µs."""
_SPIN_NS = 5_000
"""Longest time without other events while the loop does not sleep."""
_RECENT = 8  # flights
_AGAIN_S = 0.01
"""Seconds before retrying when the kernel had no memory for an operation."""


class IoRun(NamedTuple):
    """Memory for adjacent pages of a file, to write or to read."""

    fd: int
    page: int
    vectors: ctypes.Array[ctypes.c_uint64]
    """Address and length of each piece."""
    num_vectors: int
    nbytes: int
    memory: Sequence[object]
    """Owners of the memory, kept alive until the kernel is done with it."""


def run_of(fd: int, page: int, buffers: Sequence[memoryview], nbytes: int) -> IoRun:
    numbers = [number for buffer in buffers for number in (address_of(buffer), len(buffer))]
    return IoRun(fd, page, (ctypes.c_uint64 * len(numbers))(*numbers), len(buffers), nbytes, buffers)


@dataclass(slots=True, eq=False)
class Flight:
    """Runs submitted together."""

    runs: Sequence[IoRun]
    begun_at: float
    on_done: "Callable[[Flight], None]"
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


@functools.cache
def ring_libraries() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """Returns disk_ring.c for calls that release the GIL, and for short ones. Argument types are not declared, which
    would double the time of a call."""
    return load_with_and_without_gil(Path(__file__).parents[2] / "native" / "disk_ring.c")


class Ring:
    """An io_uring. Belongs to the event loop in which it was opened."""

    @classmethod
    def opened(cls, waits: HangTracker) -> "Ring | None":
        """Opens a ring; None if io_uring is not available. Raises CompilerError."""
        ring = ctypes.c_void_p()
        if error := ring_libraries()[0].ring_open(NUM_SLOTS, ctypes.byref(ring)):  # many containers forbid it
            logger.info("no io_uring here (%s): threads access the disk", os.strerror(error))
            return None
        return cls(ring, waits)

    def __init__(self, ring: ctypes.c_void_p, waits: HangTracker) -> None:
        """Use `opened`."""
        self._library, self._short = ring_libraries()
        self._ring = ring
        self._waits = waits
        self._pool = PagePool()
        self._free = list(range(NUM_SLOTS))
        self._under_way: dict[int, tuple[Flight, int]] = {}
        """Flight and index of the run, by slot."""
        self._ended = (ctypes.c_int32 * (2 * NUM_SLOTS))()
        self._again: asyncio.TimerHandle | None = None
        self._typical_s = 0.0
        """Moving average of the durations of flights."""
        self._polls_until = 0.0
        self._polls = False
        self._loop = asyncio.get_running_loop()
        self._fd = self._library.ring_fd(ring)
        self._loop.add_reader(self._fd, self._collect)

    def pages(self) -> RingPages:
        """Returns memory for operations."""
        return RingPages(self._pool)

    def takes(self, runs: Sequence[IoRun]) -> bool:
        """True if the runs can start now."""
        if len(runs) > len(self._free):
            return False
        return max([run.num_vectors for run in runs]) <= MAX_VECTORS

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
        writes = doing is DiskOperation.WRITE
        in_thread = sum([run.nbytes for run in runs]) > IN_LOOP_BYTES
        for index, (fd, page, vectors, num_vectors, _, _) in enumerate(runs):
            slot = self._free.pop()
            self._under_way[slot] = flight, index
            self._short.ring_prepare(self._ring, slot, writes, fd, page, vectors, num_vectors, in_thread)
        self._submit()
        if self._typical_s < POLLED_S:
            self._polls_until = flight.begun_at + POLLED_S
            if not self._polls:
                self._polls = True
                self._loop.call_soon(self._poll)

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
        self._polls_until = float("-inf")
        self._loop.remove_reader(self._fd)
        self._library.ring_close(self._ring)

    def validate(self) -> None:
        """Asserts that every slot is free or in flight, and that only operations in flight hold pages."""
        assert sorted([*self._free, *self._under_way]) == list(range(NUM_SLOTS))
        assert self._under_way or not self._pool.num_in_use

    def _submit(self) -> None:
        if error := self._library.ring_submit(self._ring):  # the rest goes with the next submission or after a pause
            logger.debug("io_uring accepts no operations for now: %s", os.strerror(error))
            self._again = self._loop.call_later(_AGAIN_S, self._submit)

    def _poll(self) -> None:
        """Collects what has ended, and comes again at once: other events are handled in between."""
        if self._under_way and self._waits.now < self._polls_until:
            self._collect(_SPIN_NS)
            self._loop.call_soon(self._poll)
        else:
            self._polls = False

    def _collect(self, spin_ns: int = 0) -> None:
        """Handles all completed operations; waits for `spin_ns` if there is none."""
        ended = self._ended
        for index in range(self._short.ring_collect(self._ring, ended, spin_ns)):
            self._note(ended[2 * index], ended[2 * index + 1])

    def _note(self, slot: int, nbytes: int) -> None:
        flight, index = self._under_way.pop(slot)
        self._free.append(slot)
        flight.left -= 1
        if nbytes != flight.runs[index].nbytes:
            flight.failed += (index,)
        if not flight.left:
            self._typical_s += (self._waits.now - flight.begun_at - self._typical_s) / _RECENT
            if not flight.given_up:
                flight.report()
            flight.on_released()
