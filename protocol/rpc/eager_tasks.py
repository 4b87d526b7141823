"""Eager tasks for Python 3.11: runs a coroutine at once, and in a Task only if it waits.

Most handlers finish without awaiting. A Task for each would cost an iteration of the event loop, a large part of the
cost of a call. Python 3.12 has eager tasks of its own. A coroutine cannot tell the difference: from its first line on
its current task is the one that continues it after the first wait, so that `asyncio.timeout` and cancellation work.
The module does not know about calls.
"""

import asyncio
import contextvars
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class EagerStarter:
    """Starts coroutines eagerly in the running event loop. Call `start` from a callback only, never within a task."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._prepared: _PreparedTask[Any] = _PreparedTask(self._loop)

    def start(self, body: Coroutine[Any, Any, T]) -> T | asyncio.Task[T]:
        """Returns or raises the outcome of `body`, or returns the task that continues it if it waits."""
        prepared = self._prepared
        asyncio.tasks._enter_task(self._loop, prepared.task)
        try:
            first_wait = prepared.context.run(body.send, None)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            asyncio.tasks._leave_task(self._loop, prepared.task)
            if prepared.task.cancelling():  # the body cancelled itself; the next one must not inherit that
                self._prepared = _PreparedTask(self._loop)
        self._prepared = _PreparedTask(self._loop)
        prepared.take(body, first_wait)
        return prepared.task

    async def close(self) -> None:
        self._prepared.task.cancel()
        await asyncio.wait([self._prepared.task])


class _PreparedTask(Coroutine[Any, Any, T], Generic[T]):
    """Body of a prepared task: idle at first, then the rest of a coroutine that was started eagerly.

    Coroutines that do not wait use the same prepared task, and its context, one after the other.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.context = contextvars.copy_context()
        self._taken: asyncio.Future[None] = loop.create_future()
        self._body: Coroutine[Any, Any, T] | None = None
        self._first_wait: list[Any] = []
        """The future that the coroutine awaited first, until the task awaits it."""
        self.task: asyncio.Task[T] = loop.create_task(self, context=self.context)

    def take(self, body: Coroutine[Any, Any, T], first_wait: Any) -> None:
        self._body, self._first_wait = body, [first_wait]
        # asyncio marks a future on its way from `await` to the task, and another coroutine cannot await a marked one.
        # The mark is removed here and set again when the task fetches the future.
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
        if self._first_wait:  # cancelled before the task awaited the future: do what `Task.cancel` does
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
    if wait is not None:  # None is a bare yield, like that of `asyncio.sleep(0)`
        wait._asyncio_future_blocking = True
    return wait
