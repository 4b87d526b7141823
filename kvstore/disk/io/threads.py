"""Threads for blocking I/O, which wake the event loop once per batch of jobs.

`concurrent.futures` wakes the loop once per job and needs a lock and a future for each, which costs as much as reading
64 KiB from a good disk. Does not know what the jobs do.
"""

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Job = Callable[[], T]


class OwnedResult(Generic[T]):
    """A result to wait for. The waiting caller owns memory used by the operation, so even a cancelled wait lasts to the
    end.

    Not `asyncio.shield`, which costs another turn of the event loop for each of millions of reads.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[T] = self._loop.create_future()
        self._released: asyncio.Future[None] | None = None
        self._ended = False

    @property
    def is_set(self) -> bool:
        return self._ended

    def set_result(self, result: T) -> None:
        if not self._future.done():
            self._future.set_result(result)
        self._end()

    def set_error(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)
        self._end()

    async def wait(self) -> T:
        """Waits for the result; only one task may wait. A cancellation is raised once there is a result."""
        try:
            return await self._future
        except asyncio.CancelledError:
            if not self._ended:
                self._released = self._loop.create_future()
                while not self._released.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.shield(self._released)
            raise

    def _end(self) -> None:
        self._ended = True
        if self._released is not None:
            self._released.set_result(None)


class _Batch(Generic[T]):
    """Jobs submitted together."""

    def __init__(
        self,
        jobs: Sequence[Job[T]],
        on_released: Callable[[], None] | None,
        waits_for_release: bool,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.answer: OwnedResult[list[T | OSError]] = OwnedResult()
        self._jobs = jobs
        self._on_released = on_released
        self.waits_for_release = waits_for_release
        self._given_up = False
        self._outcomes: list[T | OSError] = [OSError("not run")] * len(jobs)
        self._bug: BaseException | None = None
        self._taken = 0
        self._left = len(jobs)
        self._lock = threading.Lock()

    def take(self) -> int:
        """Returns the index of the next job. Only the thread that took the batch from the queue may call it."""
        self._taken += 1
        return self._taken - 1

    @property
    def has_more(self) -> bool:
        return self._taken < len(self._jobs)

    def run(self, index: int) -> None:
        try:
            if not self._given_up:
                self._outcomes[index] = self._jobs[index]()
        except OSError as error:
            self._outcomes[index] = error
        except BaseException as error:  # raised to the caller of `run`
            self._bug = error
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            # The loop may be closed already; then no caller is left.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._settle)

    def give_up(self) -> None:
        """Answers the batch now because the disk hangs. Jobs not started yet are skipped."""
        if not self.answer.is_set:
            self._given_up = True
            late = OSError(errno.ETIMEDOUT, "the disk does not answer")
            self.answer.set_result([late] * len(self._jobs))

    def _settle(self) -> None:
        if self._on_released is not None:
            self._on_released()
        if self.answer.is_set:
            return
        if self._bug is not None:
            self.answer.set_error(self._bug)
        else:
            self.answer.set_result(self._outcomes)


class IoThreads:
    """A fixed number of I/O threads, which run jobs in order as they become free."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._queue: SimpleQueue[_Batch[Any] | None] = SimpleQueue()
        self._unanswered: set[_Batch[Any]] = set()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_threads(self) -> int:
        return len(self._threads)

    async def run(
        self,
        jobs: Sequence[Job[T]],
        *,
        on_released: Callable[[], None] | None = None,
        waits_for_release: bool = False,
    ) -> list[T | OSError]:
        """Runs jobs and returns the result or the OSError of each. Other errors are raised.

        Returns when all jobs have ended, even if cancelled, because they use the caller's memory. Returns early if the
        jobs are given up, unless they read into that memory (`waits_for_release`). `on_released` is called in the event
        loop once they have really ended.
        """
        if not jobs:
            return []
        batch = _Batch(jobs, on_released, waits_for_release)
        self._unanswered.add(batch)
        self._queue.put(batch)
        try:
            return await batch.answer.wait()
        finally:
            self._unanswered.discard(batch)

    def give_up(self, *, everything: bool) -> None:
        """Answers waiting callers because the disk hangs. With `everything`, also callers with `waits_for_release`, for
        the final close, after which their memory is not used again."""
        for batch in self._unanswered:
            if everything or not batch.waits_for_release:
                batch.give_up()

    async def call(self, job: Job[T], *, on_released: Callable[[], None] | None = None) -> T:
        """Runs one job; returns its result or raises its error."""
        (outcome,) = await self.run([job], on_released=on_released)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    def close(self) -> None:
        """Waits for jobs in flight and stops the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        """Runs jobs. Each thread wakes the next one, since a wake-up would cost the event loop 20 µs and more."""
        while (batch := self._queue.get()) is not None:
            index = batch.take()
            if batch.has_more:
                self._queue.put(batch)
            batch.run(index)
            del batch  # an idle thread must not keep memory alive
