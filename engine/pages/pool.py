"""The pool that others use: the books of a `PageCore`, waiting for blocks, and telling of what was evicted.

May be called from any thread. Its rule: whoever is refused is told why and what to do; whoever waits, waits its turn
and not beyond its time. Blocks come back by whole requests. Does not know what is in a block, nor who runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from engine.pages.base import (
    MAX_BLOCKS,
    MAX_PRIORITY,
    MAX_REQUEST,
    BlockArray,
    Blocks,
    Mark,
    PageCore,
    PoolConfig,
    RequestArray,
    Stats,
    Wish,
    check_requests,
    counts_for,
    wish_of,
)
from engine.pages.latency import Counts, percentile_s
from engine.pages.native import NativePages
from engine.pages.prototypes import compiled
from engine.pages.twin import PythonPages
from engine.pages.waiting import Turnover, Waiter, WaitingLine
from protocol.errors import DeadlineExceeded, Overloaded


class PagePool:
    """Blocks for requests, which are numbers below 2**64. `zero` gets blocks before they are handed out, `on_evicted`
    the requests that lost theirs, before anybody can write to them. Both are called in the thread that allocates."""

    def __init__(
        self,
        config: PoolConfig,
        *,
        core: PageCore | None = None,
        zero: Callable[[Sequence[int]], None] | None = None,
        on_evicted: Callable[[list[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._core = core_for(config) if core is None else core
        self._allocate_plain = self._core.allocate_plain
        self._free = self._core.free
        self._zero = zero
        self._on_evicted = on_evicted
        self._clock = clock
        self._evicts = config.eviction is not None
        self._line = WaitingLine(config.max_waiting)
        self._line_lock = threading.Lock()
        self._num_waiting = 0  # of the line; read without the lock by who gives back
        self._turnover = Turnover(clock())
        self._count_lock = threading.Lock()
        self._outcomes = {"refused": 0, "waited": 0, "timed_out": 0}

    # -- allocation

    def allocate(
        self,
        request: int,
        count: int = 1,
        *,
        priority: int = 0,
        room: int = 0,
        wait_s: float | None = None,
    ) -> Blocks:
        """`count` more blocks for a request, new or not, behind its last one if possible. Wakes it.

        `priority` counts when it is new. `room`: how many blocks it will want from now on, so that they may come to lie
        side by side. Waits `wait_s` (None = the pool's) for its turn.
        Raises Overloaded when there is not enough and nothing to wait for, DeadlineExceeded after waiting in vain.
        """
        if (
            room
            or not 0 <= request <= MAX_REQUEST
            or not 0 < count <= MAX_BLOCKS
            or not 0 <= priority <= MAX_PRIORITY
        ):
            return self._allocate(wish_of(request, count, priority, room), wait_s)
        blocks = self._allocate_plain(request, count, priority)
        if blocks is None:
            return self._short(Wish(request, count, priority), wait_s)
        if self._zero is not None:
            self._zero(blocks)
        return blocks

    def extend(
        self, request: int, count: int = 1, *, room: int = 0, wait_s: float | None = None
    ) -> Blocks:
        """As `allocate` for a request that is there. Raises ValueError when it is not: it was freed, or evicted."""
        if room or not 0 <= request <= MAX_REQUEST or not 0 < count <= MAX_BLOCKS:
            return self._allocate(wish_of(request, count, 0, room, existing=True), wait_s)
        try:
            blocks = self._core.extend_plain(request, count)
        except LookupError as error:
            raise _unknown(request) from error
        if blocks is None:
            return self._short(Wish(request, count, existing=True), wait_s)
        if self._zero is not None:
            self._zero(blocks)
        return blocks

    def try_allocate(
        self, request: int, count: int = 1, *, priority: int = 0, room: int = 0
    ) -> Blocks | None:
        """As `allocate`, never waiting; None when there is not enough now."""
        return self._attempt(wish_of(request, count, priority, room))

    def allocate_all(
        self,
        requests: RequestArray,
        counts: int | Sequence[int] | BlockArray = 1,
        *,
        priority: int = 0,
        room: int = 0,
    ) -> tuple[BlockArray, int]:
        """For many requests at once: `counts` blocks each, as they come, until one cannot have its own.

        Gives the blocks of all, one request's behind another's, and how many requests got theirs. Neither waits nor
        evicts.
        """
        wish_of(0, 1, priority, room)
        check_requests(requests)
        blocks, done = self._core.allocate_all(
            requests, counts_for(requests, counts), priority, room
        )
        if self._zero is not None:
            self._zero(blocks.tolist())
        return blocks, done

    def reserve(self, request: int, count: int, *, priority: int = 0) -> bool:
        """`count` blocks are promised to the request from now on (0 = none): it will get them without waiting, as the
        last to be used up of what is free. False, and no change, when that cannot be promised now."""
        wish_of(request, max(count, 1), priority, 0)
        if count < 0:
            raise ValueError(f"{count} blocks cannot be promised")
        kept = self._core.reserve(request, count, priority)
        self._serve()
        return kept

    def hand_over(self, request: int, to: int, count: int = 1) -> bool:
        """The first `count` blocks of a request are those of `to` from now on, which is new, busy and of its priority:
        a prefix that others may use outlives who computed it. O(count). False when no more requests can come.

        Raises ValueError unless `request` has so many blocks and `to` is not there.
        """
        wish_of(to, 1, 0, 0), wish_of(request, count, 0, 0)
        try:
            return self._core.hand_over(request, to, count)
        except LookupError as error:
            raise ValueError(
                f"{count} blocks of request {request} cannot become {to}'s: it has fewer, or {to} is there already"
            ) from error

    # -- the end, and rest

    def free(self, request: int) -> int:
        """All that the request holds comes back, pins and promises go; how many blocks. 0 when it is not there: it may
        have been evicted."""
        if not 0 <= request <= MAX_REQUEST:
            raise ValueError(f"{request} is not a request: a number below 2**64")
        count = self._free(request)
        if self._num_waiting:
            self._serve()
        return count

    def free_all(self, requests: RequestArray) -> int:
        """Of each; how many blocks in all."""
        check_requests(requests)
        count = self._core.free_all(requests)
        self._serve()
        return count

    def rest(self, request: int) -> bool:
        """It does not run and may be evicted. False when it is not there."""
        return bool(self._mark(request, Mark.REST))

    def wake(self, request: int) -> bool:
        """It runs again. False when it is not there: evicted meanwhile."""
        return bool(self._mark(request, Mark.WAKE))

    def pin(self, request: int) -> bool:
        """Not evicted until each pin is taken off again. False when it is not there. Raises ValueError for too many."""
        return self._repin(request, Mark.PIN)

    def unpin(self, request: int) -> bool:
        """One pin less. Raises ValueError when there is none."""
        return self._repin(request, Mark.UNPIN)

    def _repin(self, request: int, mark: Mark) -> bool:
        done = self._mark(request, mark)
        if done is False:
            raise ValueError(
                f"request {request} has {'no pin' if mark is Mark.UNPIN else 'too many pins'}:"
                " there is one unpin for each pin"
            )
        return bool(done)

    def _mark(self, request: int, mark: Mark) -> bool | None:
        if not 0 <= request <= MAX_REQUEST:
            raise ValueError(f"{request} is not a request: a number below 2**64")
        done = self._core.mark(request, mark)
        if self._num_waiting:
            self._serve()
        return done

    # -- size

    def grow(self, count: int) -> int:
        """So many more blocks in service, if there is that far to go; how many came."""
        if count < 0:
            raise ValueError(f"a pool grows by a number of blocks, not {count}")
        grown = self._core.grow(count)
        self._serve()
        return grown

    def shrink(self, count: int) -> Blocks:
        """So many blocks fewer, as far as they are neither held nor promised: which went, the highest first. Those from
        `stats().end` on are gone; the others are retired, and the first to come back."""
        if count < 0:
            raise ValueError(f"a pool shrinks by a number of blocks, not {count}")
        return list(map(int, self._core.shrink(count)))

    # -- what is there

    def blocks_of(self, request: int) -> Blocks:
        """In the order in which they were allocated; empty when it is not there."""
        wish_of(request, 1, 0, 0)
        blocks = self._core.blocks_of(request)
        return [] if blocks is None else list(map(int, blocks))

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def outcomes(self) -> Mapping[str, int]:
        """Of allocations for which there was not enough: refused, waited, and of these timed out."""
        with self._count_lock:
            return dict(self._outcomes)

    def stats(self) -> Stats:
        return self._core.stats()

    def fragmentation(self) -> float:
        """Runs of blocks per request: 1 when each lies in one piece, 0 when there is none."""
        stats = self._core.stats()
        return stats.runs / stats.requests if stats.requests else 0.0

    def latencies(self) -> Counts:
        return self._core.latencies()

    def latency_s(self, percent: float) -> float:
        """Within which so many per cent of the allocations were done, not counting what they waited for blocks."""
        return percentile_s(self._core.latencies(), percent)

    def validate(self) -> None:
        """Raises AssertionError unless every block is accounted for exactly once. O(blocks)."""
        self._core.validate()
        with self._line_lock:
            self._line.validate()
            assert self._num_waiting == len(self._line), "who waits was miscounted"

    # -- when there is not enough

    def _short(self, wish: Wish, wait_s: float | None) -> Blocks:
        """There is not enough without eviction."""
        return self._allocate(wish, wait_s) if self._evicts else self._refused(wish, wait_s)

    def _allocate(self, wish: Wish, wait_s: float | None) -> Blocks:
        blocks = self._attempt(wish)
        return self._refused(wish, wait_s) if blocks is None else blocks

    def _attempt(self, wish: Wish) -> Blocks | None:
        try:
            blocks, evicted = self._take(wish)
        except LookupError as error:
            raise _unknown(wish.request) from error
        self._tell(evicted)
        if blocks is not None and self._zero is not None:
            self._zero(blocks)
        return blocks

    def _refused(self, wish: Wish, wait_s: float | None) -> Blocks:
        wait_s = self.config.wait_s if wait_s is None else wait_s
        if wait_s <= 0:
            raise self._overloaded(wish, "")
        blocks = self._wait(wish, wait_s)
        if self._zero is not None:
            self._zero(blocks)
        return blocks

    def _take(self, wish: Wish) -> tuple[Blocks | None, list[int]]:
        if self._evicts:
            return self._core.allocate_evicting(wish)
        return self._core.allocate(wish), []

    def _tell(self, evicted: list[int]) -> None:
        if evicted and self._on_evicted is not None:
            self._on_evicted(evicted)

    def _wait(self, wish: Wish, wait_s: float) -> Blocks:
        rank = self._core.rank_of(wish.request, wish.priority)
        waiter = Waiter(replace(wish, ahead=True), rank)
        with self._line_lock:
            if self._line.is_full:
                raise self._overloaded(wish, f"and {len(self._line)} allocations wait already, ")
            self._line.join(waiter)
        try:
            self._count("waited")
            self._serve(certain=True)
            waiter.done.wait(wait_s)
        finally:
            self._stop_waiting(waiter)
            self._tell(waiter.evicted)
        if waiter.error is not None:
            raise _unknown(wish.request) from waiter.error
        if waiter.blocks is None:
            self._count("timed_out")
            raise DeadlineExceeded(
                f"no {wish.count} blocks came back within {wait_s} s: wait longer (wait_s), ask for"
                " less, or grow the pool",
                request=str(wish.request),
            )
        return waiter.blocks

    def _stop_waiting(self, waiter: Waiter) -> None:
        with self._line_lock:
            if not waiter.done.is_set():
                self._line.leave(waiter)
                self._serve_in_turn()

    def _serve(self, *, certain: bool = False) -> None:
        """Something came back, or somebody came: whose turn it is may have enough now."""
        if certain or self._num_waiting:
            with self._line_lock:
                self._serve_in_turn()

    def _serve_in_turn(self) -> None:
        self._num_waiting = len(self._line)  # before looking: who gives back from now on serves
        while self._line and self._serve_one(self._line.first):
            self._line.leave(self._line.first)
        self._num_waiting = len(self._line)
        self._core.set_barrier(self._line.barrier)

    def _serve_one(self, waiter: Waiter) -> bool:
        try:
            blocks, evicted = self._take(waiter.wish)
        except LookupError as error:
            waiter.error = error
        else:
            waiter.evicted += evicted
            if blocks is None:
                return False
            waiter.blocks = blocks
        waiter.done.set()
        return True

    def _count(self, outcome: str) -> None:
        with self._count_lock:
            self._outcomes[outcome] += 1

    def _overloaded(self, wish: Wish, further: str) -> Overloaded:
        self._count("refused")
        stats = self._core.stats()
        promised = stats.promised + stats.promised_high
        retry_after_s = self._turnover.retry_after_s(self._clock(), stats.freed, wish.count)
        return Overloaded(
            f"no {wish.count} blocks for the request: {stats.free} of {stats.num_blocks} are free,"
            f" {promised} of these promised, {self.config.reserved_ppm / 10_000:g} % reserved for"
            f" priorities above 0, {stats.requests} of {self.config.request_limit} requests there,"
            f" {further}come later, wait (wait_s), let requests rest for eviction, or grow the pool",
            retry_after_s=retry_after_s,
            request=str(wish.request),
        )


def core_for(config: PoolConfig) -> PageCore:
    """Compiled where there is a compiler, else in Python, after one warning."""
    library = compiled()
    return PythonPages(config) if library is None else NativePages(library, config)


def _unknown(request: int) -> ValueError:
    return ValueError(
        f"request {request} holds nothing here (freed, or evicted while it rested):"
        " allocate what it needs anew"
    )
