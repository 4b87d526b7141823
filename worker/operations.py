"""Operations in flight, each an asyncio task whose outcome becomes an event.

An operation is a coroutine that returns the event to report. If it is cancelled on purpose, the event given for that
case is reported. Any other exception is a bug, which ends the worker instead of leaving a request waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from worker.events import Event

Operation = Coroutine[Any, Any, Event | None]


class Operations:
    """Holds the tasks of one worker. `failed` gets the exception of an operation or report that raises."""

    def __init__(self, report: Callable[[Event], None]) -> None:
        self._report = report
        self._tasks: set[asyncio.Task[Event | None]] = set()
        self._stopping = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, operation: Operation, *, when_cancelled: Event | None = None) -> asyncio.Task[Event | None]:
        """Starts an operation, whose outcome is reported when it ends."""
        task = asyncio.get_running_loop().create_task(operation)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._done(done, when_cancelled))
        return task

    def _done(self, task: asyncio.Task[Event | None], when_cancelled: Event | None) -> None:
        self._tasks.discard(task)
        if self._stopping:
            return
        if task.cancelled():
            event = when_cancelled
        elif (error := task.exception()) is not None:
            self._fail(error)
            return
        else:
            event = task.result()
        if event is not None:
            self._try_report(event)

    def _try_report(self, event: Event) -> None:
        try:
            self._report(event)
        except Exception as error:  # the event loop would only log it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def ended(self) -> None:
        """Waits until no operation is in flight. Raises the exception of `failed`, if any."""
        while self._tasks and not self.failed.done():
            waited: set[asyncio.Future[Any]] = {*self._tasks, self.failed}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            self.failed.result()

    async def stop(self) -> None:
        """Cancels all operations and waits until they have ended, without reporting their outcomes."""
        self._stopping = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.failed.done():
            self.failed.exception()  # marks it as retrieved, so that asyncio does not log it
        else:
            self.failed.cancel()
