"""The outcome of one `submit`, for threads and for asyncio.

An outcome is final: once `done`, no byte of the batch moves and no error changes. A batch has one job per peer and is
notified once per job, when no part of the job moves any more. Knows no sessions.
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
    """Awaitable result of a submission. Raises the first failed transfer's error; `errors` has all of them."""

    __slots__ = ("_callbacks", "_errors", "_gate", "_lock", "_on_done", "_parts_left", "cancelled")

    def __init__(self, num_transfers: int, num_parts: int, on_done: Callable[[], None]) -> None:
        self._errors: list[MoonserveError | None] = [None] * num_transfers
        self._parts_left = num_parts
        self._on_done = on_done
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.cancelled = False
        """True once cancellation was requested. Parts that have not started fail with Cancelled."""
        # A plain lock, released when the batch is done: a quarter of the cost of an Event, on the compute thread.
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
        """One entry per transfer, in order; None if it succeeded or has not ended yet."""
        return tuple(self._errors)

    def cancel(self) -> None:
        """Prevents parts that have not started from starting; has no effect on parts that have ended. Parts in flight
        end within a slice's time: the batch's memory may be reused only when `done` is true."""
        self.cancelled = True

    def settle_part(self, errors: Mapping[int, MoonserveError]) -> None:
        """Records that one peer's job has ended. `errors` is keyed by transfer index."""
        with self._lock:
            for index, error in errors.items():
                self._errors[index] = error
            if self._parts_left == 1:
                self._on_done()  # must run before `done` becomes true
                self._on_done = _nothing  # releases what the callback holds
            self._parts_left -= 1
            if self._parts_left:
                return
        self._gate.release()
        for callback in self._callbacks:
            _call(callback)
        self._callbacks.clear()

    def add_done_callback(self, callback: Callable[[Batch], None]) -> None:
        """Registers a callback. It runs once, in the thread that ends the batch, or immediately if the batch is done.
        It must not block."""
        with self._lock:
            if self._parts_left:
                self._callbacks.append(lambda: callback(self))
                return
        callback(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the batch is done and raises the first error. Raises DeadlineExceeded after `timeout_s`."""
        if not self._gate.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise DeadlineExceeded(f"batch not done after {timeout_s} s")
        self._gate.release()
        self._raise_first()

    def __await__(self) -> Generator[Any, None, None]:
        """Waits for the batch on the running loop. Cancelling the awaiting task leaves the batch running."""
        if not self.done:
            yield from self._future(asyncio.get_running_loop()).__await__()
        self._raise_first()

    def _future(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        future: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not future.done():
                future.set_result(None)

        def from_worker() -> None:
            # A closed loop has no waiting task.
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
    except Exception:  # an error in a callback must not end the transfer thread
        _log.exception("a callback of a transfer batch failed")


class Job:
    """The work of one batch for one peer. Any thread may settle its parts, one by one."""

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
        """Returns the error of a part that will not be started: Cancelled, or PeerLost with the message `overdue`."""
        if self.cancelled:
            return Cancelled("the batch was cancelled")
        return PeerLost(overdue, peer=peer)

    def settle(self, part: Part, error: MoonserveError | None) -> None:
        """Records the final outcome of a part."""
        with self._lock:
            assert self._left > 0, "a part has ended twice"
            if error is not None:
                for index in part.indices:
                    self._errors.setdefault(index, error)
            self._left -= 1
            if self._left:
                return
        self._batch.settle_part(self._errors)
