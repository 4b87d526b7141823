"""Background management of a worker's elastic KV memory: applies limits, populates pages ahead and gives pages back.

`run` is a task next to the worker's own. Pages are handled in another thread, one at a time: populating a page while it
is given back would leave it resident without being counted. `engine.elastic.paged_blanks` makes the decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from engine.elastic.paged_blanks import GiveBack, PagedBlanks, Populate, Supply
from engine.elastic.pages import Paging
from engine.elastic.seat import Seat
from protocol.errors import InvalidRequest
from protocol.pb.worker_pb2 import KvLimits

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
"""Poll interval while this worker waits for pages: a worker that died rings no bell."""
TELL_S = 1.0
"""Interval at which spare pages are reported to the other workers."""


class Memory(Protocol):
    """Memory that can be populated and discarded in parts (`transfer.shm.memfd.OwnedMemory`)."""

    @property
    def resident_bytes(self) -> int: ...
    def populate(self, offset: int, nbytes: int) -> None: ...
    def discard(self, offset: int, nbytes: int) -> None: ...


class Elasticity:
    """Manager of one pool's elastic memory. `references`: reference counts of the blocks, set once there is a pool."""

    def __init__(
        self,
        paging: Paging,
        memory: Memory,
        seat: Seat | None = None,
        *,
        floor: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.paging = paging
        self._memory = memory
        self._seat = seat
        self._floor = floor
        self._clock = clock
        self._due = asyncio.Event()
        self.references: Sequence[int] = ()
        self.num_populated = self.num_given_back = 0  # pages
        supply = seat or Supply(paging.num_pages)
        self.blanks = PagedBlanks(paging, supply, on_work=self._due.set)

    # -- limits

    def limits(self) -> KvLimits:
        page_bytes = self.paging.page_bytes
        return KvLimits(
            floor_bytes=self._floor,
            ceiling_bytes=self.blanks.ceiling * page_bytes,
            largest_bytes=self.paging.range_bytes,
            held_bytes=self.blanks.num_held_pages * page_bytes,
            resident_bytes=self._memory.resident_bytes,
            wanted_bytes=self.blanks.num_wanted_pages * page_bytes,
            budget_bytes=None if self._seat is None else self._seat.budget,
        )

    def limit(self, *, floor: int | None = None, ceiling: int | None = None, budget: int | None = None) -> None:
        """Changes limits, in bytes; None leaves a limit unchanged. Raises InvalidRequest for a ceiling below a page or
        above the address range, and ConfigError for floors that do not fit. The caller must notify the worker's state
        afterwards, so that it releases blocks above the limits."""
        if budget is not None:
            if self._seat is None:
                raise InvalidRequest("this worker shares no budget; see --kv-memory-budget")
            self._seat.resize(budget)
        page_bytes = self.paging.page_bytes
        pages = self.blanks.ceiling if ceiling is None else ceiling // page_bytes
        if not 0 < pages <= self.paging.num_pages:
            raise InvalidRequest(
                f"a ceiling of {ceiling} bytes is not between a page, {page_bytes} bytes, and what there are addresses "
                f"for, {self.paging.range_bytes} bytes (--kv-cache-memory)"
            )
        lowest = self._floor if floor is None else floor
        if floor is None:
            lowest = min(lowest, pages * page_bytes)
        if not 0 <= lowest <= pages * page_bytes:
            raise InvalidRequest(f"a floor of {lowest} bytes above the ceiling")
        if self._seat is not None:
            self._seat.limit(lowest, pages * page_bytes)
        self._floor = lowest
        self.blanks.limit(pages)

    # -- the work

    async def run(self, on_change: Callable[[], None]) -> None:
        """Runs until cancelled. `on_change` is called when blocks may have become available or must be released."""
        with self._listening():
            self._due.set()
            while True:
                await self._wait()
                await asyncio.sleep(0)  # lets requests run between two looks
                self._due.clear()
                self._look(on_change)
                while (action := self.blanks.next_action(self._clock())) is not None:
                    await self._do(action)
                    if isinstance(action, GiveBack):
                        self._look(on_change)

    def _look(self, on_change: Callable[[], None]) -> None:
        blanks = self.blanks
        if self._seat is not None:
            if self.references:
                blanks.tell_spare(self.references)
            self._seat.look()
        waited = blanks.num_wanted_pages
        if not waited and not blanks.is_leaving:
            return
        blanks.want_nothing()
        on_change()
        if waited:
            blanks.tell_wish()  # repeats the wish, or withdraws it

    async def _do(self, action: Populate | GiveBack) -> None:
        doing = asyncio.ensure_future(asyncio.to_thread(self._perform, action))
        try:
            await asyncio.shield(doing)
        finally:  # also when cancelled: the page's state must be right for the next `run`
            await asyncio.wait({doing})
            if isinstance(action, GiveBack):
                self.num_given_back += 1
                self.blanks.given_back(action)
            else:
                self.num_populated += 1

    def _perform(self, action: Populate | GiveBack) -> None:
        for offset in self.paging.spans(action.page):
            if isinstance(action, GiveBack):
                self._memory.discard(offset, self.paging.span_bytes)
            else:
                self._memory.populate(offset, self.paging.span_bytes)

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s()):
                await self._due.wait()

    def _wait_s(self) -> float | None:
        waits = [] if self._seat is None else [TELL_S]
        if self.blanks.num_wanted_pages:
            waits.append(LOOK_AGAIN_S)
        if (wake_at := self.blanks.wake_at()) is not None:
            waits.append(max(0.0, wake_at - self._clock()))
        return min(waits, default=None)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        if self._seat is None:
            yield
            return
        loop, bell = asyncio.get_running_loop(), self._seat.bell
        loop.add_reader(bell, self._rung)
        try:
            yield
        finally:
            loop.remove_reader(bell)

    def _rung(self) -> None:
        assert self._seat is not None, "who shares nothing has no bell"
        self._seat.answer()
        self._due.set()

    def close(self) -> None:
        if self._seat is not None:
            self._seat.close()
