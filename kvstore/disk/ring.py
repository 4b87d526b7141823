"""Reads and writes through io_uring: submitted from the event loop, which the kernel wakes when they have ended.

A thread costs two wake-ups for each of them and waits for the interpreter's lock: more than 64 KiB from a good disk.
Needs a C compiler and a kernel that allows io_uring; `opened` says None without them. Its rule: memory is kept until
the kernel is done with it, whoever has given up waiting. An outcome that is not what was asked for is no error here: a
thread asks again, and knows why. Knows nothing of what it moves.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.disk.base import PAGE
from kvstore.disk.uring import BUFFER, IN_KERNEL_THREAD, OPERATION, Opcode, Uring
from kvstore.disk.waits import Waits
from protocol.native import CompilerError
from transfer.native.base import address_of

logger = logging.getLogger(__name__)

NUM_SLOTS = 64
"""Operations under way at once; what comes beyond goes to the threads."""
MAX_BUFFERS = 256
"""Of one operation: 128 objects with their headers."""
IN_LOOP_BYTES = 5 * 2**18
"""Begun together; more is begun by threads of the kernel. Pinning a megabyte's pages and asking the device for them
takes the loop 40 µs, waking such a thread 5, but then the megabyte lands 30 µs later."""


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
    results: list[int] = field(default_factory=list)
    """By run, bytes; below 0 when it failed or was not waited for."""
    given_up: bool = False

    def is_whole(self, index: int) -> bool:
        return self.results[index] == self.runs[index].nbytes

    def error(self) -> OSError:
        """For whoever waited in vain."""
        return OSError(errno.ETIMEDOUT, "the disk does not answer")

    def give_up(self) -> None:
        """Whoever waits is told that nothing has landed."""
        if not self.given_up:
            self.given_up = True
            self.results = [-1] * len(self.runs)
            self.tell()

    def tell(self) -> None:
        """Who waits often holds this in turn: without the way back, no garbage collector is needed."""
        landed, self.landed = self.landed, _told
        landed(self)


class Ring:
    """Belongs to the event loop in which it was opened."""

    @classmethod
    def opened(cls, waits: Waits) -> Ring | None:
        """None where there is no io_uring to be had. The first call on a machine takes as long as the compiler."""
        try:
            return cls(Uring(NUM_SLOTS), waits)
        except (CompilerError, OSError) as error:  # many containers forbid it
            logger.info("no io_uring here (%s): the disk is asked by threads", error)
            return None

    def __init__(self, uring: Uring, waits: Waits) -> None:
        """Use `opened`."""
        self._uring = uring
        self._waits = waits
        self._vectors = memoryview(mmap.mmap(-1, NUM_SLOTS * MAX_BUFFERS * BUFFER.size))
        self._vectors_at = address_of(self._vectors)
        self._free = list(range(NUM_SLOTS))
        self._under_way: dict[int, tuple[Flight, int]] = {}
        """By slot, the flight and the index of its run."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(uring.fd, self._ended)

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def takes(self, runs: Sequence[Run]) -> bool:
        """Whether they can begin now."""
        if len(runs) > len(self._free):
            return False
        most = max([len(run.buffers) for run in runs])
        return most <= MAX_BUFFERS

    def begin(
        self,
        what: Opcode,
        runs: Sequence[Run],
        *,
        landed: Callable[[Flight], None],
        over: Callable[[], None],
        until_over: bool = False,
    ) -> None:
        """Those that `takes` lets. `landed` and `over` are called from the event loop later, in this order if the disk
        answers in time."""
        flight = Flight(runs, self._waits.now, landed, over, until_over, len(runs))
        flight.results = [-1] * len(runs)
        slots = [self._free.pop() for _ in runs]
        in_loop = sum([run.nbytes for run in runs]) <= IN_LOOP_BYTES
        for index, (slot, run) in enumerate(zip(slots, runs, strict=True)):
            self._under_way[slot] = flight, index
            self._prepare(what, index, slot, run, 0 if in_loop else IN_KERNEL_THREAD)
        begun = self._uring.submit(len(runs))
        for slot in slots[begun:]:  # the kernel has no memory for them
            self._loop.call_soon(self._note, slot, -1)

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
        self._loop.remove_reader(self._uring.fd)
        self._uring.close()

    def validate(self) -> None:
        """Every slot is free or under way."""
        assert sorted([*self._free, *self._under_way]) == list(range(NUM_SLOTS))

    def _prepare(self, what: Opcode, index: int, slot: int, run: Run, flags: int) -> None:
        begin = at = slot * MAX_BUFFERS * BUFFER.size
        for buffer in run.buffers:
            BUFFER.pack_into(self._vectors, at, address_of(buffer), len(buffer))
            at += BUFFER.size
        OPERATION.pack_into(
            self._uring.operations,
            index * OPERATION.size,
            self._vectors_at + begin,
            run.page * PAGE,
            slot,
            run.fd,
            len(run.buffers),
            what,
            flags,
        )

    def _ended(self) -> None:
        for slot, result in self._uring.reap():
            self._note(slot, result)

    def _note(self, slot: int, result: int) -> None:
        flight, index = self._under_way.pop(slot)
        self._free.append(slot)
        flight.left -= 1
        if not flight.given_up:
            flight.results[index] = result
        if not flight.left:
            if not flight.given_up:
                flight.tell()
            flight.over()


def _told(flight: Flight) -> None:
    """Nobody waits any more."""
