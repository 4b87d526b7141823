"""Instants at which something may be due, so that nobody has to poll.

Setting is cheap and nothing is ever unset: an alarm only says "look at this now", and whoever looks finds out
whether it is still due.
"""

from __future__ import annotations

import heapq
from enum import Enum, auto


class AlarmKind(Enum):
    """What an alarm asks to look at; its key is a lease id or a request id."""

    RESERVE = auto()
    LEASE = auto()
    ENDED_LEASE = auto()
    SEQUENCE = auto()
    TOMBSTONE = auto()
    SEEN = auto()


class Alarms:
    """A heap of (instant, kind, key)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, AlarmKind, str]] = []
        self._count = 0  # breaks ties in order of setting

    @property
    def next_at(self) -> float | None:
        """The earliest alarm; None = no alarm is set."""
        return self._heap[0][0] if self._heap else None

    def set(self, at: float, kind: AlarmKind, key: str) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, kind, key))

    def due(self, now: float) -> list[tuple[AlarmKind, str]]:
        """Removes and returns what is due, earliest first."""
        found: list[tuple[AlarmKind, str]] = []
        while self._heap and self._heap[0][0] <= now:
            _, _, kind, key = heapq.heappop(self._heap)
            found.append((kind, key))
        return found
