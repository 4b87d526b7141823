"""How long the disk has not answered: what each thread asked it for, and when.

A job may take long; one system call may not. So a job that goes from call to call is never overdue, and one that is
stuck in a call is. Safe to use from several threads. Knows neither the calls nor what a limit is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

Clock = Callable[[], float]


class Waits:
    """A context around whatever may hang. Contexts of one thread nest: leaving an inner one is progress too."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._since: dict[int, tuple[int, float]] = {}
        """By thread: how deep it is, and when it last heard of the disk."""

    def __enter__(self) -> None:
        thread = threading.get_ident()
        depth, _ = self._since.get(thread, (0, 0.0))
        self._since[thread] = depth + 1, self._clock()

    def __exit__(self, *exc_info: object) -> None:
        thread = threading.get_ident()
        depth, _ = self._since.pop(thread)
        if depth > 1:
            self._since[thread] = depth - 1, self._clock()

    @property
    def now(self) -> float:
        return self._clock()

    def longest_s(self) -> float:
        """Of those that wait now; 0.0 when nobody does."""
        begun = [since for _, since in list(self._since.values())]
        return self._clock() - min(begun) if begun else 0.0

    def validate(self) -> None:
        """Whoever waits is in at least one context."""
        assert all(depth > 0 for depth, _ in list(self._since.values()))
