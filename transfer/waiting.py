"""Groups of parts on their way along one path: handed to a lane, then waiting for its session.

A small batch does not wait behind a large one, since parts are taken from the groups in turn. Handing a
group over neither blocks nor gives up the GIL, since the compute thread does it. Knows no sessions.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable

from transfer.batch import Job
from transfer.plan import Part

_CONNECT_S = 3.0
"""A path on which connecting takes longer is left for another, if there is one: the kernel has then sent
its first packet three times."""


class Group:
    """Parts of one job on their way along one path. Handed from thread to thread, never shared."""

    __slots__ = ("connect_until", "fresh", "give_up_at", "job", "parts")

    def __init__(self, job: Job, parts: Iterable[Part]) -> None:
        self.job = job
        self.parts = deque(parts)
        self.fresh = True
        """Nothing of it has been handed out."""
        now = time.monotonic()
        first = self.parts[0]
        self.give_up_at = attempt_ends_at(first, now)
        """What has not been begun by then is tried another way."""
        self.connect_until = self.give_up_at
        if first.has_alternative:
            self.connect_until = min(self.give_up_at, now + _CONNECT_S)


def attempt_ends_at(part: Part, now: float) -> float:
    """Half of the time that is left, where there is another way to try."""
    if not part.has_alternative:
        return part.deadline_at
    return now + (part.deadline_at - now) / 2


class Waiting(deque[Group]):
    """Groups that wait; the first one has the turn, and none is empty."""

    def pop_part(self) -> Part:
        """The next part of the first group, whose turn is over with it."""
        group = self[0]
        part = group.parts.popleft()
        if group.parts:
            self.rotate(-1)
        else:
            self.popleft()
        return part

    def pop_ended(self, now: float) -> list[Part]:
        """Parts whose batch is cancelled or out of time."""
        return self._pop([g for g in self if g.job.cancelled or g.job.deadline_at <= now])

    def pop_impatient(self, now: float) -> list[Part]:
        """Parts that should be tried another way by now."""
        return self._pop([group for group in self if group.give_up_at <= now])

    def pop_disconnected(self, now: float, connected_until: float) -> list[Part]:
        """Parts that have waited long enough for a connection; all, if it was not for time."""
        if now < connected_until:
            return self._pop(list(self))
        return self._pop([group for group in self if group.connect_until <= now])

    def _pop(self, groups: list[Group]) -> list[Part]:
        for group in groups:
            self.remove(group)
        return [part for group in groups for part in group.parts]


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
            waiting.append(group)
        return group is not None

    def empty_into(self, waiting: Waiting) -> None:
        """Takes over all that is there. Does not wait."""
        while not self._queue.empty():
            if (group := self._queue.get()) is not None:
                waiting.append(group)
