"""The outcome of one `submit`, for threads and for asyncio.

A batch is final once: after `done` no byte of it moves and no error changes. A batch has one job per
peer, which it hears of once, when no part of the job moves any more. Knows no sessions.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

from protocol.errors import Cancelled, DeadlineExceeded, MoonserveError, PeerLost
from transfer.plan import Part, Planned

_log = logging.getLogger(__name__)


def _nothing() -> None:
    pass


class Batch:
    """Awaitable. Raises the first transfer's error when any failed; `errors` has all of them."""

    __slots__ = ("_callbacks", "_errors", "_gate", "_lock", "_on_done", "_parts_left", "cancelled")

    def __init__(self, num_transfers: int, num_parts: int, on_done: Callable[[], None]) -> None:
        self._errors: list[MoonserveError | None] = [None] * num_transfers
        self._parts_left = num_parts
        self._on_done = on_done
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.cancelled = False
        """Somebody asked for its end; what had not begun fails with Cancelled."""
        # A bare lock, open once done: a quarter of the price of an Event, on the compute thread.
        self._gate = threading.Lock()
        if num_parts:
            self._gate.acquire()
        else:
            on_done()

    @property
    def done(self) -> bool:
        return not self._parts_left

    @property
    def errors(self) -> tuple[MoonserveError | None, ...]:
        """One entry per transfer, in order; None where it succeeded (or has not ended yet)."""
        return tuple(self._errors)

    def cancel(self) -> None:
        """Nothing more of it is begun. What is under way ends first, within a slice's time: the batch is
        done, and its memory free, when `done` says so. No effect on what has ended."""
        self.cancelled = True

    def settle_part(self, errors: Mapping[int, MoonserveError]) -> None:
        """One peer's part has ended; `errors` by index of the transfer."""
        with self._lock:
            for index, error in errors.items():
                self._errors[index] = error
            if self._parts_left == 1:
                self._on_done()  # before anybody can see it done
                self._on_done = _nothing  # what it holds is held no longer
            self._parts_left -= 1
            if self._parts_left:
                return
        self._gate.release()
        for callback in self._callbacks:
            _call(callback)
        self._callbacks.clear()

    def add_done_callback(self, callback: Callable[[Batch], None]) -> None:
        """Called once, in the thread that ends the batch, or now when it is done. Must not block."""
        with self._lock:
            if self._parts_left:
                self._callbacks.append(lambda: callback(self))
                return
        callback(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks the thread. Raises DeadlineExceeded when the batch is not done in time."""
        if not self._gate.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise DeadlineExceeded(f"batch not done after {timeout_s} s")
        self._gate.release()
        self._raise_first()

    def __await__(self) -> Generator[Any, None, None]:
        """Cancelling the awaiting task leaves the batch running."""
        if not self.done:
            yield from self._future(asyncio.get_running_loop()).__await__()
        self._raise_first()

    def _future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        future: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not future.done():
                future.set_result(None)

        def from_worker() -> None:
            # A loop that has been closed has nobody left to tell.
            if not loop.is_closed():
                loop.call_soon_threadsafe(resolve)

        with self._lock:
            if self._parts_left:
                self._callbacks.append(from_worker)
                return future
        resolve()
        return future

    def _raise_first(self) -> None:
        for error in self._errors:
            if error is not None:
                raise error


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:  # a caller's mistake must not end the thread that carries the transfers
        _log.exception("a callback of a transfer batch failed")


class Job:
    """The work of one batch for one peer. Its parts are settled one by one, from any thread."""

    __slots__ = ("_batch", "_errors", "_left", "_lock", "deadline_at", "nbytes")

    def __init__(self, planned: Planned, batch: Batch, deadline_at: float) -> None:
        self.deadline_at = deadline_at
        self.nbytes = sum(part.nbytes for part in planned.parts)
        self._batch = batch
        self._errors = planned.errors
        self._lock = threading.Lock()
        for part in planned.parts:
            part.job = self
        self._left = len(planned.parts)
        if not self._left:
            batch.settle_part(self._errors)

    @property
    def cancelled(self) -> bool:
        return self._batch.cancelled

    def why_ended(self, overdue: str, peer: str) -> MoonserveError:
        """The error of a part that is begun no more; `overdue`: what to say where its time is over."""
        if self.cancelled:
            return Cancelled("the batch was cancelled")
        return PeerLost(overdue, peer=peer)

    def settle(self, part: Part, error: MoonserveError | None) -> None:
        """The part has ended for good."""
        with self._lock:
            assert self._left > 0, "a part has ended twice"
            if error is not None:
                for index in part.indices:
                    self._errors.setdefault(index, error)
            self._left -= 1
            if self._left:
                return
        self._batch.settle_part(self._errors)
