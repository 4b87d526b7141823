"""What all synthetic traces have in common: new block ids, and threads that wait for their next request.

A *thread* is the activity of one user. Only the arrival process decides when requests come: at each arrival, the thread
that is due longest continues, or a new one begins. So think times are lower bounds. Load does not stretch them in the
steady state, since a thread begins only if none is due.
"""

import heapq
from typing import Generic, TypeVar

MAX_WAITING = 200_000  # threads between two requests; about 100 MB

Chain = tuple[int, ...]  # the ids of a prompt, from the head on
Thread = TypeVar("Thread")


class BlockIds:
    """Allocates ids from 0 up, in the order in which they are written. So they are dense, and neighbours of a new block
    are its chain."""

    def __init__(self) -> None:
        self._next = 0

    def extend(self, chain: Chain, count: int) -> Chain:
        """Returns the chain extended by `count` new ids."""
        self._next += count
        return (*chain, *range(self._next - count, self._next))


class WaitingThreads(Generic[Thread]):
    """The threads between two requests, by due time."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Thread]] = []  # the number breaks ties
        self._num_waits = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, thread: Thread, due_s: float) -> None:
        """Lets a thread wait. Above the limit it ends instead, so memory is bounded."""
        if len(self._waiting) < MAX_WAITING:
            self._num_waits += 1
            heapq.heappush(self._waiting, (due_s, self._num_waits, thread))

    def pop_due(self, at_s: float) -> Thread | None:
        """Removes and returns the thread that is due longest; None if none is due."""
        if self._waiting and self._waiting[0][0] <= at_s:
            return heapq.heappop(self._waiting)[2]
        return None
