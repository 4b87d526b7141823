"""Runs a coroutine at once, and makes it a Task's only if it really waits.

Most handlers decide without awaiting. A Task for each would cost them a turn of the event loop, a good part of what
a call costs. Python 3.12 has eager tasks; this is the same for 3.11. Its rule: a coroutine cannot tell the difference.
From its first line on it sees one current task, which is the one that goes on with it when it waits, so that
`asyncio.timeout` and cancellation work. Knows nothing of calls.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class EagerStart:
    """Belongs to the running event loop; `start` may only be called from a callback, not from within a task."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._seat: _Seat[Any] = _Seat(self._loop)

    def start(self, body: Coroutine[Any, Any, T]) -> T | asyncio.Task[T]:
        """What `body` returns or raises, or, if it waits, the task that goes on with it."""
        seat = self._seat
        asyncio.tasks._enter_task(self._loop, seat.task)
        try:
            first_wait = seat.context.run(body.send, None)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            asyncio.tasks._leave_task(self._loop, seat.task)
            if seat.task.cancelling():  # it cancelled itself; that must not reach the next one
                self._seat = _Seat(self._loop)
        self._seat = _Seat(self._loop)
        seat.take(body, first_wait)
        return seat.task

    async def close(self) -> None:
        self._seat.task.cancel()
        await asyncio.wait([self._seat.task])


class _Seat(Coroutine[Any, Any, T], Generic[T]):
    """What a task runs that stands ready for a coroutine: nothing at first, then the rest of that coroutine.

    Coroutines that do not wait use one seat after the other, and with it one context.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.context = contextvars.copy_context()
        self._taken: asyncio.Future[None] = loop.create_future()
        self._body: Coroutine[Any, Any, T] | None = None
        self._first_wait: list[Any] = []
        """What the coroutine waits for, until the task waits for it."""
        self.task: asyncio.Task[T] = loop.create_task(self, context=self.context)

    def take(self, body: Coroutine[Any, Any, T], first_wait: Any) -> None:
        self._body, self._first_wait = body, [first_wait]
        # The mark of a future that is on its way from `await` to its task (asyncio.futures). Nobody else could await
        # the same one until the task comes for it, so the mark is put back then.
        if first_wait is not None:
            first_wait._asyncio_future_blocking = False
        if not self._taken.done():
            self._taken.set_result(None)

    def send(self, value: Any) -> Any:
        if self._body is None:
            return next(self._taken.__await__())
        if self._first_wait:
            return _marked(self._first_wait.pop())
        return self._body.send(value)

    def throw(self, error: Any, value: Any = None, traceback: Any = None) -> Any:
        if self._body is None:
            raise error
        if self._first_wait:  # cancelled before the task came to wait for it: as `Task.cancel` does
            wait = self._first_wait.pop()
            if wait is not None and wait.cancel():
                return _marked(wait)
        return self._body.throw(error)

    def close(self) -> None:
        if self._body is not None:
            self._body.close()

    def __await__(self) -> Generator[Any, None, T]:
        raise TypeError("belongs to its task")


def _marked(wait: Any) -> Any:
    if wait is not None:  # a bare yield, as of `asyncio.sleep(0)`
        wait._asyncio_future_blocking = True
    return wait
