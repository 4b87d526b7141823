"""The event loop of virtual time: pops an event, sets the time, calls the handler, which *returns* new events.

Owns the queue of future events; no other code touches it. Simultaneous events are handled in the order in which they
were returned, so a run depends only on its first events. Does not know the meaning of events. A handler must recognise
obsolete ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

E = TypeVar("E")


class Timed(NamedTuple, Generic[E]):
    """An event and its time, in seconds of virtual time."""

    at: float
    event: E


Handler = Callable[[E, float], Iterable[Timed[E]]]


class Clock(Generic[E]):
    """Virtual time, which only moves forward."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0  # handled so far
        self._queue: list[tuple[float, int, E]] = []
        self._num_queued = 0

    def run(self, first: Iterable[Timed[E]], handle: Handler[E]) -> None:
        """Handles events until none is left. Raises ValueError if a handler returns an event of the past."""
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
