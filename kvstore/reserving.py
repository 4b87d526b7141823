"""Which generations were given before an instant: so that a removal heard of late takes what was there when it
happened, and not what was stored since. Pure: `now` is an argument.

Exact to 20 ms for about a minute of a busy node, to 10 s for a day; where it is not exact, it counts too many as
earlier: a value that is lost is better than one that is wrong.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

FINE_S = 0.02
COARSE_S = 10.0
_NUM_FINE = 4_096
_NUM_COARSE = 9_000


class Mark(NamedTuple):
    """All generations below `generation` were given before `at`, all others not before."""

    at: float
    generation: int


class Reserving:
    """When a node gave its generations, as far as it is remembered."""

    def __init__(self) -> None:
        self._fine: deque[Mark] = deque(maxlen=_NUM_FINE)
        self._coarse: deque[Mark] = deque(maxlen=_NUM_COARSE)

    def note(self, now: float, next_generation: int) -> None:
        """The next generation is about to be given."""
        if self._fine and now - self._fine[-1].at < FINE_S:
            return
        self._fine.append(Mark(now, next_generation))
        if not self._coarse or now - self._coarse[-1].at >= COARSE_S:
            self._coarse.append(self._fine[-1])

    def before(self, at: float, next_generation: int) -> int:
        """A bound: what was given before `at` is below it."""
        marks = self._fine if self._fine and self._fine[0].at <= at else self._coarse
        later = next((mark for mark in (*marks, *self._fine) if mark.at >= at), None)
        return next_generation if later is None else later.generation
