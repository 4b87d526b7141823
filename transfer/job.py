"""A batch's work for one peer, from its parts to its outcome.

Owns which parts are left and what went wrong with which transfer. Its rule: the batch hears of it once,
when no part of it moves any more. Thread-safe; knows no sessions.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable

from protocol.errors import MoonserveError
from transfer.batch import Batch
from transfer.plan import Owner, Part, Planned

_CONNECT_S = 3.0
"""A path on which connecting takes longer is left for another, if there is one: the kernel has then sent
its first packet three times."""


class Job:
    """Parts are settled one by one, from any thread."""

    __slots__ = ("_batch", "_errors", "_left", "_lock", "deadline_at", "nbytes")

    def __init__(self, planned: Planned, batch: Batch, deadline_at: float) -> None:
        self.deadline_at = deadline_at
        self.nbytes = sum(part.nbytes for part in planned.parts)
        self._batch = batch
        self._errors = planned.errors
        self._lock = threading.Lock()
        for part in planned.parts:
            part.job = self
        self._left = len(planned.parts)
        if not self._left:
            batch.settle_part(self._errors)

    @property
    def cancelled(self) -> bool:
        return self._batch.cancelled

    def settle(self, part: Part, error: MoonserveError | None) -> None:
        """The part has ended for good."""
        with self._lock:
            assert self._left > 0, "a part has ended twice"
            if error is not None:
                for index in part.indices:
                    self._errors.setdefault(index, error)
            self._left -= 1
            if self._left:
                return
        self._batch.settle_part(self._errors)


class Group:
    """Parts of one job on their way along one path. Handed from thread to thread, never shared."""

    __slots__ = ("connect_until", "fresh", "give_up_at", "job", "parts")

    def __init__(self, job: Owner, parts: Iterable[Part]) -> None:
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
