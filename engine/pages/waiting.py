"""Who waits for blocks, and whose turn it is.

Its rule: priority first; then those who hold something before newcomers, since their end gives back; then in the order
in which they came. Only the first may be served: what is too little for it is saved up for it. Pure, but for the event
that tells a waiter.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from dataclasses import dataclass, field

from engine.pages.base import Blocks, Wish


@dataclass(slots=True, eq=False)
class Waiter:
    """One allocation that waits. Exactly one of `blocks` and `error` is there once it is `done`."""

    wish: Wish  # that does not queue: it is in the queue
    rank: int  # `PageCore.rank_of`
    done: threading.Event = field(default_factory=threading.Event)
    blocks: Blocks | None = None
    error: Exception | None = None
    evicted: list[int] = field(default_factory=list)  # for it


class WaitingLine:
    """At most `most` waiters in order."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._line: list[tuple[int, int, Waiter]] = []  # (-rank, number, waiter)
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._line)

    @property
    def is_full(self) -> bool:
        return len(self._line) >= self._most

    @property
    def first(self) -> Waiter:
        return self._line[0][2]

    @property
    def barrier(self) -> int:
        """Who ranks below it must wait too (`PageCore.set_barrier`)."""
        return self.first.rank + 1 if self._line else 0

    def join(self, waiter: Waiter) -> None:
        bisect.insort(self._line, (-waiter.rank, next(self._numbers), waiter))

    def leave(self, waiter: Waiter) -> None:
        self._line = [entry for entry in self._line if entry[2] is not waiter]

    def validate(self) -> None:
        """Raises AssertionError unless all who are in line wait, in order."""
        assert len(self._line) <= self._most, "too many wait"
        assert self._line == sorted(self._line, key=lambda entry: entry[:2]), "out of order"
        assert not any(entry[2].done.is_set() for entry in self._line), "somebody waits in vain"


class Turnover:
    """How many blocks come back per second, from what was freed between two looks at least five seconds apart."""

    SPAN_S = 5.0
    SHORTEST_S, LONGEST_S = 0.05, 30.0
    """Of what is answered: sooner is not worth asking, and later nobody can know."""

    def __init__(self, now: float) -> None:
        self._looks = (now, 0), (now, 0)

    def retry_after_s(self, now: float, freed: int, short: int) -> float:
        """When `short` more blocks may have come back."""
        before, last = self._looks
        if now - last[0] >= self.SPAN_S:
            self._looks = last, (now, freed)
        per_s = (freed - before[1]) / max(now - before[0], 1e-3)
        wait_s = short / per_s if per_s else self.LONGEST_S
        return min(max(wait_s, self.SHORTEST_S), self.LONGEST_S)
