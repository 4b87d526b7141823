"""Event loop in virtual time that runs all processes of a simulated cluster.

The loop never waits: when nothing is ready, time advances to the next timer. The context of every task and callback
names the process life it belongs to (`LIFE`), so that callbacks of a stopped process are held and those of a dead one
are dropped, whatever their origin. It does not know what the processes do.
"""

import asyncio
import contextlib
import contextvars
import heapq
import inspect
import itertools
import logging
import random
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from moonserve.kvstore.state.removals import CLOCK_DRIFT


class Life:
    """One run of a process, from its start to its death. It can be stopped and continued."""

    def __init__(self, name: str, epoch: int, rng: random.Random, loop: "VirtualLoop") -> None:
        self.name = name
        self.epoch = epoch
        self.is_alive = True
        self.is_stopped = False
        self.held: list[asyncio.Handle] = []  # while stopped
        self.ends: list[Callable[[], None]] = []  # called when it dies
        self._loop = loop
        self._ahead_s = rng.uniform(0.0, 1e6)
        self._rate = rng.uniform(1 - CLOCK_DRIFT / 2, 1 + CLOCK_DRIFT / 2)
        self.context = contextvars.copy_context()
        self.context.run(LIFE.set, self)

    def __repr__(self) -> str:
        return f"{self.name}#{self.epoch}"

    def clock(self) -> float:
        """Returns the process's own monotonic time in seconds. Offset and rate differ between processes."""
        return self._ahead_s + self._rate * self._loop.time()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work, context=self.context)

    def soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Schedules a callback in this life. It is held while the process is stopped and dropped once it is dead."""
        self._loop.call_soon(callback, *args, context=self.context)

    def stop(self) -> None:
        """Stops the process, as SIGSTOP does."""
        self.is_stopped = True

    def go_on(self) -> None:
        """Continues the process, as SIGCONT does. Held callbacks run now, in their order."""
        self.is_stopped = False
        held, self.held = self.held, []
        for handle in held:
            self._loop.again(handle)

    def die(self) -> None:
        """Kills the process, as SIGKILL does."""
        self.is_alive = False
        self.held.clear()
        for end in self.ends:
            end()


LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)

OUTSIDE = contextvars.Context()
"""Context of callbacks that belong to no process: links, clients and faults."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Event loop with what asyncio's tasks, futures, events, timeouts and queues use, and `run_in_executor`."""

    def __init__(self, rng: random.Random, on_problem: Callable[[str, BaseException | None], None]) -> None:
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._ties = itertools.count()
        self._rng = rng
        self._on_problem = on_problem
        self._tasks: list[asyncio.Task[Any]] = []
        self._is_closed = False

    # -- interface used by asyncio

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._is_closed:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self._now + max(0.0, delay), callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._ties), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)  # keeps a dead process's task from being garbage-collected
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Runs the function in the loop after a short random delay."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self._rng.expovariate(2000), work)
        return future

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return self._is_closed

    def is_running(self) -> bool:
        return True

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_closed:
            self._on_problem(str(context.get("message")), context.get("exception"))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: a cancelled timer is skipped when it is due."""

    # -- running

    def again(self, handle: asyncio.Handle) -> None:
        """Schedules a handle that was held while its process was stopped."""
        self._ready.append(handle)

    def run_until(self, at: float) -> None:
        asyncio._set_running_loop(self)
        try:
            while True:
                while self._ready:
                    self._run(self._ready.popleft())
                if not self._timers or self._timers[0][0] > at:
                    self._now = max(self._now, at)
                    return
                due_at, _, handle = heapq.heappop(self._timers)
                self._now = max(self._now, due_at)
                self._run(handle)
        finally:
            asyncio._set_running_loop(None)

    def _run(self, handle: asyncio.Handle) -> None:
        if handle._cancelled:  # type: ignore[attr-defined]
            return
        life = handle._context.get(LIFE)  # type: ignore[attr-defined]
        if life is None or (life.is_alive and not life.is_stopped):
            handle._run()
        elif life.is_alive:
            life.held.append(handle)

    def close(self) -> None:
        """Closes the loop and all unfinished tasks. Their logging and warnings are suppressed."""
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()
        asyncio._set_running_loop(self)
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # coroutines that they create while they are closed
                for task in self._tasks:
                    _end(task)
        finally:
            logging.disable(disabled)
            asyncio._set_running_loop(None)
        self._tasks.clear()


def _end(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        coroutine: Any = task.get_coro()
        if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == "CORO_CREATED":
            # Coroutines in its arguments are closed too: since Python 3.13 they warn when they are collected.
            for held in filter(inspect.iscoroutine, coroutine.cr_frame.f_locals.values()):
                held.close()
        with contextlib.suppress(BaseException):
            coroutine.close()
