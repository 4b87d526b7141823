"""Tasks that somebody holds: started at will, their failures logged, cancelled and awaited together.

Unlike asyncio.TaskGroup one task's failure does not end the others: each belongs to a different request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from protocol.logs import of

log = logging.getLogger(__name__)


class TaskGroup:
    """A set of running tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self, coroutine: Coroutine[Any, Any, None], *, name: str, request_id: str = ""
    ) -> asyncio.Task[None]:
        """`request_id`: whose it is, for the log."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, request_id))
        return task

    async def cancel(self) -> None:
        """Ends all tasks and waits for their clean-up."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self, timeout_s: float) -> None:
        """Waits for the tasks under way, at most so long."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout_s)

    def _ended(self, task: asyncio.Task[Any], request_id: str) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            whose = of(request_id) if request_id else None
            log.error("task %s failed", task.get_name(), exc_info=error, extra=whose)
