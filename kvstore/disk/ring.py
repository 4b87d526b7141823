"""Small reads through io_uring: submitted from the event loop, which the kernel wakes when they have landed.

A thread costs two wake-ups for each read and waits for the interpreter's lock: more than 64 KiB from a good disk.
Needs the package `liburing` (extra `uring`) and a kernel that allows it; `opened` says None without them.
Its rule: a run is read into a slot, memory of the ring's own, never into the caller's. `liburing` keeps a reference to
every vector of buffers for ever, so that vectors are made once per slot and length, and used again. Its error numbers
are not always the kernel's: who gets None asks again by a system call, which knows. Knows nothing of what it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.disk.base import PAGE
from kvstore.disk.threads import Answer
from kvstore.disk.waits import Waits

logger = logging.getLogger(__name__)

NUM_SLOTS = 64
"""Reads under way at once; what comes beyond goes to the threads."""
SLOT_PAGES = 64
"""The longest read, 256 KiB. The copy out of a slot and the hash are the loop's: 15 µs for as much."""


@dataclass(frozen=True, slots=True)
class RingRead:
    """Pages of a file that lie next to each other."""

    fd: int
    page: int
    num_pages: int


@dataclass(slots=True, eq=False)
class Landing:
    """Reads that were asked for together. `slots` hold what was read until they are given back."""

    slots: list[int]
    begun_at: float
    answer: Answer[None]
    given_up: bool = False
    nbytes: dict[int, int | None] = field(default_factory=dict)
    """By slot, what has landed; None = it failed."""


class Ring:
    """Belongs to the event loop in which it was opened."""

    @classmethod
    def opened(cls, waits: Waits) -> Ring | None:
        """None where there is no io_uring to be had."""
        try:
            uring = importlib.import_module("liburing")
        except ImportError:
            return None
        ring = uring.Ring()
        try:
            uring.io_uring_queue_init(NUM_SLOTS, ring)
        except OSError as error:  # many containers forbid it
            logger.info("no io_uring here (%s): small reads go through threads", error)
            return None
        return cls(uring, ring, waits)

    def __init__(self, uring: Any, ring: Any, waits: Waits) -> None:
        """Use `opened`."""
        self._uring = uring
        self._ring = ring
        self._waits = waits
        self._entry = uring.Cqe()
        self._memory = memoryview(mmap.mmap(-1, NUM_SLOTS * SLOT_PAGES * PAGE))
        self._free = list(range(NUM_SLOTS))
        self._vectors: dict[tuple[int, int], Any] = {}
        self._landings: dict[int, Landing] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ring.ring_fd, self._landed)

    @property
    def num_under_way(self) -> int:
        return len(self._landings)

    def takes(self, num_pages: Sequence[int]) -> bool:
        """Whether reads of so many pages can begin now."""
        return len(num_pages) <= len(self._free) and max(num_pages) <= SLOT_PAGES

    async def read(self, reads: Sequence[RingRead]) -> Landing:
        """What has landed, to be looked at by `content` and given back. A cancellation waits for the disk too."""
        landing = Landing([self._free.pop() for _ in reads], self._waits.now, Answer())
        for slot, read in zip(landing.slots, reads, strict=True):
            self._landings[slot] = landing
            self._prepare(slot, read)
        self._uring.io_uring_submit(self._ring)
        try:
            await landing.answer.wait()
        except asyncio.CancelledError:
            self.give_back(landing)
            raise
        return landing

    def content(self, landing: Landing, index: int) -> memoryview | None:
        """What the read of that index has brought, shorter at the end of a file; None = it failed."""
        slot = landing.slots[index]
        nbytes = landing.nbytes.get(slot)
        begin = slot * SLOT_PAGES * PAGE
        return None if nbytes is None else self._memory[begin : begin + nbytes]

    def give_back(self, landing: Landing) -> None:
        """Slots of reads that were given up come back when the disk is done with them."""
        self._free += [slot for slot in landing.slots if slot in landing.nbytes]
        landing.slots.clear()

    def longest_s(self) -> float:
        """How long the oldest read waits."""
        begun = [landing.begun_at for landing in self._landings.values()]
        return self._waits.now - min(begun) if begun else 0.0

    def give_up(self) -> None:
        """The disk hangs: whoever waits is told that nothing has landed."""
        for landing in set(self._landings.values()):
            if not landing.given_up:
                landing.given_up = True
                landing.answer.give(None)

    def close(self) -> None:
        self._loop.remove_reader(self._ring.ring_fd)
        self._uring.io_uring_queue_exit(self._ring)

    def validate(self) -> None:
        """Every slot is free, being read into, or being looked at; none twice."""
        taken = [*self._free, *self._landings]
        assert len(set(taken)) == len(taken) <= NUM_SLOTS

    def _prepare(self, slot: int, read: RingRead) -> None:
        entry = self._uring.io_uring_get_sqe(self._ring)
        vector = self._vector(slot, read.num_pages)
        self._uring.io_uring_prep_readv(entry, read.fd, vector, read.page * PAGE)
        entry.user_data = slot + 1  # zero is refused

    def _vector(self, slot: int, num_pages: int) -> Any:
        vector = self._vectors.get((slot, num_pages))
        if vector is None:
            begin = slot * SLOT_PAGES * PAGE
            vector = self._uring.Iovec([self._memory[begin : begin + num_pages * PAGE]])
            self._vectors[slot, num_pages] = vector
        return vector

    def _landed(self) -> None:
        """All that are there; the loop has just seen that it is one at least."""
        uring, ring = self._uring, self._ring
        for _ in range(uring.io_uring_cq_ready(ring)):
            uring.io_uring_peek_cqe(ring, self._entry)
            done = self._entry[0]
            nbytes: int | None = None
            with contextlib.suppress(OSError):
                nbytes = done.res
            slot = done.user_data - 1
            uring.io_uring_cqe_seen(ring, done)
            self._note(slot, nbytes)

    def _note(self, slot: int, nbytes: int | None) -> None:
        landing = self._landings.pop(slot)
        if landing.given_up:
            self._free.append(slot)
            return
        landing.nbytes[slot] = nbytes
        if len(landing.nbytes) == len(landing.slots):
            landing.answer.give(None)
