"""Additions to asyncio's event loop: background tasks that are held and can be cancelled, timers, waits, calls from
other threads.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from typing import Any, TypeVar

from moonserve.protocol.errors import PeerLost
from moonserve.protocol.process.logs import request_extra

log = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundTasks:
    """Set of background tasks that have not ended yet, held because an event loop holds tasks only weakly.

    It can cancel all of them. Each task handles its own errors."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts `work` as a task and returns the task at once."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(tuple(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)

    async def cancel(self) -> None:
        """Cancels all tasks and returns once they have ended. Their errors are ignored."""
        await cancel_all(tuple(self._tasks))


class LoggedTasks(BackgroundTasks):
    """Background tasks that do not affect each other; a failure is logged with the request of its task."""

    def start(self, work: Coroutine[Any, Any, T], *, name: str = "", request_id: str = "") -> asyncio.Task[T]:
        """Starts a task. `request_id`: the request that the task works for, used in the log."""
        task = super().start(work)
        task.set_name(name or task.get_name())
        task.add_done_callback(lambda done: _log_failure(done, request_id))
        return task

    async def drain(self, timeout_s: float) -> None:
        """Waits for the running tasks, for at most `timeout_s`."""
        if tasks := list(self):
            await asyncio.wait(tasks, timeout=timeout_s)


def _log_failure(task: asyncio.Task[Any], request_id: str) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        extra = request_extra(request_id) if request_id else None
        log.error("task %s failed", task.get_name(), exc_info=error, extra=extra)


async def cancel_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancels tasks and returns once they have ended. Their errors are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def background_task(body: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Runs `body` as a task within the block and cancels it at the end of the block."""
    task = asyncio.create_task(body)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


class Timer:
    """Timer for the next time at which something is due, for example in a `state.py`.

    Calls `ring` at the time last passed to `set`, or slightly before it. `ring` must call `set` again."""

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._handle: asyncio.TimerHandle | None = None
        self.due_at: float | None = None

    def set(self, due_at: float | None) -> None:
        """Sets the time on `clock`; None = nothing is due. No-op if the time is unchanged."""
        if due_at == self.due_at:
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self.due_at = None, due_at
        if due_at is not None:
            delay_s = max(0.0, due_at - self._clock())
            self._handle = asyncio.get_running_loop().call_later(delay_s, self._on_due)

    def _on_due(self) -> None:
        self._handle = self.due_at = None
        self._ring()


async def wait_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for `event` and returns true, or false after `timeout_s`.

    `wait_for` is not used, since in Python 3.11 it loses a cancellation that coincides with the event.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


class LoopRunner:
    """Runs functions in the event loop's thread on behalf of other threads, which wait for the result.

    The loop must run for as long as a thread may wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def run(self, work: Callable[[], T]) -> T:
        """Runs `work` in the loop's thread and returns or raises its outcome. Raises PeerLost if the loop is closed."""
        done = threading.Lock()  # a lock is the cheapest way to wait for another thread
        done.acquire()
        results: list[T] = []
        errors: list[BaseException] = []

        def run_and_report() -> None:
            try:
                results.append(work())
            except BaseException as error:  # raised again in the waiting thread
                errors.append(error)
            finally:
                done.release()

        try:
            self._loop.call_soon_threadsafe(run_and_report)
        except RuntimeError as error:
            raise PeerLost("this process is stopping") from error
        done.acquire()
        if errors:
            raise errors[0]
        return results[0]
