"""What has been handed to a lane and not been taken over yet: groups of parts, from any thread.

Its rule: handing over neither blocks nor gives up the GIL, since the compute thread does it. One thread takes at a
time. Knows no sessions and no deadlines.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

from transfer.job import Group
from transfer.waiting import Waiting


class Inbox:
    """Groups, and knocks that bring nothing."""

    __slots__ = ("_queue", "empty")

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self.empty: Callable[[], bool] = self._queue.empty
        """Asked once a slice: without a call in between."""

    def put(self, group: Group) -> None:
        self._queue.put(group)

    def knock(self) -> None:
        """Wakes whoever waits."""
        self._queue.put(None)

    def wait_into(self, waiting: Waiting, timeout_s: float) -> bool:
        """Takes over one group; False when there was none, or only a knock."""
        try:
            group = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if group is not None:
            waiting.add(group)
        return group is not None

    def empty_into(self, waiting: Waiting) -> None:
        """Takes over all that is there. Does not wait."""
        while not self._queue.empty():
            if (group := self._queue.get()) is not None:
                waiting.add(group)
