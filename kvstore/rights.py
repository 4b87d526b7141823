"""Bookkeeping that timed rights share: when each expires, and which ids have ended. Pure; knows no objects."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Result = TypeVar("Result")

REMEMBER_ENDED_S = 60.0  # longer than the deadline of any call that might still arrive


class Deadlines:
    """When rights expire. `expires_at` gives a right's current expiry, None when it has none (any more).

    Entries are never searched for: one that no longer says its right's expiry is skipped when it surfaces.
    """

    def __init__(self, expires_at: Callable[[str], float | None]) -> None:
        self._expires_at = expires_at
        self._heap: list[tuple[float, str]] = []

    def note(self, right_id: str, at: float) -> None:
        """`right_id` now expires at `at`."""
        heapq.heappush(self._heap, (at, right_id))

    def next(self) -> float | None:
        """The earliest expiry."""
        while self._heap:
            at, right_id = self._heap[0]
            if self._expires_at(right_id) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def due(self, now: float) -> Iterator[str]:
        """Takes out the rights that are over at `now`; the caller ends each before it asks for the next."""
        while (at := self.next()) is not None and at <= now:
            yield heapq.heappop(self._heap)[1]

    def __contains__(self, right_id: str) -> bool:
        return (self._expires_at(right_id), right_id) in self._heap


class Ended(Generic[Result]):
    """Ids of rights that are over, for `REMEMBER_ENDED_S`, and what came of those that came to something."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[float, Result | None]] = {}  # oldest first

    def remember(self, right_id: str, now: float, result: Result | None = None) -> None:
        """`right_id` ended at `now`; the first word stands."""
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest][0] > now:
                break
            del self._entries[oldest]
        self._entries.setdefault(right_id, (now + REMEMBER_ENDED_S, result))

    def __contains__(self, right_id: str) -> bool:
        return right_id in self._entries

    def result(self, right_id: str) -> Result | None:
        """What came of it; None also when the id is not known."""
        _, result = self._entries.get(right_id, (0.0, None))
        return result
