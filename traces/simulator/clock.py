"""The event loop of virtual time: pop an event, set the time, handle it; handlers *return* what follows.

It owns the queue of what is to come, and nobody else touches it. Events of one instant are handled in the order in
which they were returned, so that a run is a function of its first events alone. What the loop does not know: what
events mean. An event that has become pointless is for its handler to recognize.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

E = TypeVar("E")


class Timed(NamedTuple, Generic[E]):
    """An event and when it happens, in seconds of virtual time."""

    at: float
    event: E


Handler = Callable[[E, float], Iterable[Timed[E]]]


class Clock(Generic[E]):
    """Virtual time, which only moves forward."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0  # handled
        self._queue: list[tuple[float, int, E]] = []
        self._num_queued = 0

    def run(self, first: Iterable[Timed[E]], handle: Handler[E]) -> None:
        """Until nothing is left to happen. Raises ValueError when a handler returns an event of the past."""
        self._push(first)
        while self._queue:
            self.now, _, event = heapq.heappop(self._queue)
            self.num_events += 1
            self._push(handle(event, self.now))

    def _push(self, events: Iterable[Timed[E]]) -> None:
        for at, event in events:
            if at < self.now:
                raise ValueError(f"{event} at {at} is before {self.now}")
            self._num_queued += 1
            heapq.heappush(self._queue, (at, self._num_queued, event))
