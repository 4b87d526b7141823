"""Background tasks that do not affect each other; a failure is logged with the request of its task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from protocol.held_tasks import HeldTasks
from protocol.logs import of

log = logging.getLogger(__name__)

T = TypeVar("T")


class LoggedTasks(HeldTasks):
    """Tasks of a gateway. Its requests share them, so a failure ends no other task."""

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
        whose = of(request_id) if request_id else None
        log.error("task %s failed", task.get_name(), exc_info=error, extra=whose)
