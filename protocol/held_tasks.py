"""Tasks that nobody awaits where they begin: an event loop itself holds tasks only weakly.

Owns the tasks until they have ended, and their common end. Knows nothing of what they do: each deals with its own
errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class HeldTasks:
    """Those that have not ended yet."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Does not wait."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(tuple(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)

    async def cancel(self) -> None:
        """Returns once all have ended, whatever they raise."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
