"""How long a prompt waits in an instance's queue: what is left of the one that runs, and all that goes before it.

Work runs one at a time, lowest rank first and in order of arrival within a rank (all ranks alike: FCFS). It runs in
steps: a later one of lower rank goes before the rest of what runs once the step under way has ended. The book is told
of arrivals and ends only, so it assumes that the next one begins when the one before it ends, and that what went before
the rest of another did so all the time until it ended. Pure; knows neither instances nor where predictions come from.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from conductor.cost.ordered_sums import OrderedSums, Place
from conductor.native.prefills import QueueRecord

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Work:
    place: Place
    seconds: float  # predicted


class WorkQueue(Generic[K]):
    """Predicted work of one instance, in the order in which it will run. What changes cost: `ordered_sums`."""

    def __init__(self, step_s: float = math.inf) -> None:
        """`step_s`: how long one of lower rank waits for what runs, at most; infinite: what began runs to its end."""
        self._step_s = step_s
        self._work: dict[K, _Work] = {}
        self._by_number: dict[int, K] = {}
        self._waiting = OrderedSums()
        self._num_arrived = 0
        self._running: K | None = None
        self._began_at = 0.0

    def __len__(self) -> int:
        return len(self._work)

    def __contains__(self, key: object) -> bool:
        return key in self._work

    def add(self, key: K, seconds: float, now: float, rank: float = 0.0) -> None:
        """Arrives now behind its equals; a key that is here already gives up its place."""
        if key in self._work:
            self.remove(key, now)
        self._num_arrived += 1
        work = _Work((rank, self._num_arrived), seconds)
        self._work[key] = work
        self._by_number[self._num_arrived] = key
        if self._running is None:  # then nothing waits
            self._running, self._began_at = key, now
        else:
            self._waiting.add(work.place, seconds)

    def remove(self, key: K, now: float) -> None:
        """It ended or was given up. Unknown keys are ignored. One that should still wait has run already."""
        work = self._work.pop(key, None)
        if work is None:
            return
        del self._by_number[work.place[1]]
        if key == self._running:
            self._begin_next(now)
            return
        self._waiting.remove(work.place)
        if self._interrupts(work.place):
            self._began_at = min(self._began_at + work.seconds, now)

    @property
    def waiting_s(self) -> float:
        """Of all but the one that runs."""
        return self._waiting.total

    @property
    def running_s(self) -> float:
        """Predicted, of the one that runs from its beginning; 0 when none does."""
        return 0.0 if self._running is None else self._work[self._running].seconds

    @property
    def began_at(self) -> float:
        """When the one that runs began, as far as known."""
        return self._began_at

    def fill(self, record: QueueRecord) -> None:
        """With all that `look` needs to know; it holds until the next change of this queue."""
        record.places, record.sums, record.count = self._waiting.columns()
        record.is_running = self._running is not None
        record.step_s, record.began_at = self._step_s, self._began_at
        if self._running is not None:
            work = self._work[self._running]
            record.running_place, record.running_s = work.place[0], work.seconds

    def in_order(self) -> list[K]:
        """All keys as they will run. O(n)."""
        waiting = [self._by_number[number] for _, number in self._waiting.places()]
        return waiting if self._running is None else [self._running, *waiting]

    def residual_s(self, now: float) -> float:
        """What is left of the one that runs; 0 when it should have ended, which is all that is known then."""
        if self._running is None:
            return 0.0
        return max(self._work[self._running].seconds - max(now - self._began_at, 0.0), 0.0)

    def wait_s(self, now: float, rank: float = 0.0) -> float:
        """Seconds until one that arrives now with this rank begins."""
        return self._before_s((rank, self._num_arrived + 1), now)

    def look(self, now: float, rank: float = 0.0) -> tuple[float, int]:
        """`wait_s`, and how many one that arrives now with this rank goes before, or before the rest of them."""
        place = (rank, self._num_arrived + 1)
        before_s, num_delayed = self._waiting.around(place)
        left_s = self.residual_s(now)
        if left_s > self._step_s and self._interrupts(place):
            return self._step_s + before_s, num_delayed + 1
        return left_s + before_s, num_delayed

    def wait_of_s(self, key: K, now: float) -> float:
        """Seconds until this one begins; 0 when it runs. Raises KeyError."""
        work = self._work[key]
        if key == self._running:
            return 0.0
        return self._before_s(work.place, now)

    def total_s(self, now: float) -> float:
        """Until the last one ends."""
        return self.residual_s(now) + self._waiting.total

    def _before_s(self, place: Place, now: float) -> float:
        left_s = self.residual_s(now)
        if self._interrupts(place):
            left_s = min(left_s, self._step_s)
        return left_s + self._waiting.before(place)

    def _interrupts(self, place: Place) -> bool:
        """Whether work at this place goes before the rest of what runs."""
        if self._running is None or math.isinf(self._step_s):
            return False
        return place < self._work[self._running].place

    def _begin_next(self, now: float) -> None:
        place = self._waiting.first()
        if place is None:
            self._running = None
            return
        self._waiting.remove(place)
        self._running = self._by_number[place[1]]
        self._began_at = now

    def validate(self) -> None:
        self._waiting.validate()
        assert {work.place[1]: key for key, work in self._work.items()} == self._by_number
        assert (self._running is None) == (not self._work)
        waiting = [w.seconds for key, w in self._work.items() if key != self._running]
        assert math.isclose(self._waiting.total, math.fsum(waiting), rel_tol=1e-9, abs_tol=1e-9)
