"""Groups of parts queued for one path: handed to a lane, then waiting for its session.

A small batch does not wait behind a large one, since parts are taken from the groups in turn. Handing over a group
neither blocks nor releases the GIL, since the compute thread does it. Knows no sessions.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable

from moonserve.transfer.batch import Job, Part

_CONNECT_S = 3.0
"""A path on which connecting takes longer is given up for another, if there is one. By then the kernel has sent its
first packet three times."""


class Group:
    """Parts of one job queued for one path. Passed from thread to thread, never shared."""

    __slots__ = ("connect_until", "fresh", "give_up_at", "job", "parts")

    def __init__(self, job: Job, parts: Iterable[Part]) -> None:
        self.job = job
        self.parts = deque(parts)
        self.fresh = True
        """True until its first part is considered for sending."""
        now = time.monotonic()
        first = self.parts[0]
        self.give_up_at = attempt_ends_at(first, now)
        """Parts that have not started by then are tried on another path."""
        self.connect_until = self.give_up_at
        if first.has_alternative:
            self.connect_until = min(self.give_up_at, now + _CONNECT_S)


def attempt_ends_at(part: Part, now: float) -> float:
    """Returns when an attempt ends: after half of the remaining time if another path can be tried, else at the
    deadline."""
    return now + (part.deadline_at - now) / 2 if part.has_alternative else part.deadline_at


class GroupQueue(deque[Group]):
    """Waiting groups, served round-robin. The first one is next, and none is empty."""

    def pop_part(self) -> Part:
        """Takes the next part of the first group, then moves that group to the end."""
        group = self[0]
        part = group.parts.popleft()
        if group.parts:
            self.rotate(-1)
        else:
            self.popleft()
        return part

    def pop_ended(self, now: float) -> list[Part]:
        """Removes and returns parts whose batch is cancelled or past its deadline."""
        return self._pop([g for g in self if g.job.cancelled or g.job.deadline_at <= now])

    def pop_retryable(self, now: float) -> list[Part]:
        """Removes and returns parts that are due for another path."""
        return self._pop([group for group in self if group.give_up_at <= now])

    def pop_disconnected(self, now: float, connect_until: float) -> list[Part]:
        """Removes and returns parts whose time to connect has passed, or all if connecting failed before
        `connect_until`."""
        if now < connect_until:
            return self._pop(list(self))
        return self._pop([group for group in self if group.connect_until <= now])

    def _pop(self, groups: list[Group]) -> list[Part]:
        for group in groups:
            self.remove(group)
        return [part for group in groups for part in group.parts]


class Inbox:
    """Thread-safe queue of groups, and of wake-ups without a group."""

    __slots__ = ("_queue", "empty")

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self.empty: Callable[[], bool] = self._queue.empty
        """A bound method because it is called for every slice."""

    def put(self, group: Group) -> None:
        self._queue.put(group)

    def wake(self) -> None:
        """Wakes the waiting thread."""
        self._queue.put(None)

    def wait_into(self, waiting: GroupQueue, timeout_s: float) -> bool:
        """Moves one group to `waiting`. Returns False on timeout or on a wake-up without a group."""
        try:
            group = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if group is not None:
            waiting.append(group)
        return group is not None

    def drain_into(self, waiting: GroupQueue) -> None:
        """Moves all queued groups to `waiting`. Does not wait."""
        while not self._queue.empty():
            if (group := self._queue.get()) is not None:
                waiting.append(group)
