"""Operations under way, each a held task whose outcome becomes an event.

An operation is a coroutine that returns the event to report. One that is cancelled on purpose reports the event named
for that case; one that raises anything else is a bug, which ends the worker rather than leave a request waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from worker.events import Event

Operation = Coroutine[Any, Any, Event | None]


class Operations:
    """Holds the tasks of one worker. `failed` is done when an operation raised what it must not."""

    def __init__(self, report: Callable[[Event], None]) -> None:
        self._report = report
        self._tasks: set[asyncio.Task[Event | None]] = set()
        self._stopping = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, operation: Operation, *, when_cancelled: Event | None = None) -> asyncio.Task[Event | None]:
        """Runs an operation and reports its outcome."""
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
        except Exception as error:  # a callback's exception would only be logged by the loop
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def ended(self) -> None:
        """Waits until nothing is under way. Raises what an operation must not have raised."""
        while self._tasks and not self.failed.done():
            waited: set[asyncio.Future[Any]] = {*self._tasks, self.failed}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            self.failed.result()

    async def stop(self) -> None:
        """Cancels everything and waits until it has ended; nothing is reported any more."""
        self._stopping = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.failed.done():
            self.failed.exception()  # seen by whoever waited for it, or of no use any more
        else:
            self.failed.cancel()
