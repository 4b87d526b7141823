"""Seconds in an order, with the sum before any place, and how many come after it: sorted lists. Pure.

Sums are added up from the first place and never subtracted, so that no rounding error is left behind; only those behind
the last change are made anew, when somebody asks. A change at the end, the usual one, is O(log n), elsewhere it moves
and adds what lies behind: for a thousand entries 25 µs at worst, and for the dozens that are usual a tree took longer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

Place = tuple[float, int]  # rank, then number


class OrderedSums:
    """Entries at places that are all different."""

    __slots__ = ("_places", "_seconds", "_sums")

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._seconds: list[float] = []
        self._sums = [0.0]  # before each place and at the end, as far as they are known

    def __len__(self) -> int:
        return len(self._places)

    @property
    def total(self) -> float:
        return self._known()[-1]

    def add(self, place: Place, seconds: float) -> None:
        at = bisect_left(self._places, place)
        self._places.insert(at, place)
        self._seconds.insert(at, seconds)
        del self._sums[at + 1 :]

    def remove(self, place: Place) -> None:
        """The place must be taken."""
        at = bisect_left(self._places, place)
        assert self._places[at] == place, "nothing is there"
        del self._places[at], self._seconds[at], self._sums[at + 1 :]

    def before(self, place: Place) -> float:
        """Seconds of all entries at lower places."""
        return self._known()[bisect_left(self._places, place)]

    def around(self, place: Place) -> tuple[float, int]:
        """Seconds of all entries at lower places, and the number of those at higher ones; this place is free."""
        at = bisect_left(self._places, place)
        return self._known()[at], len(self._places) - at

    def first(self) -> Place | None:
        """The lowest place; None when there is none."""
        return self._places[0] if self._places else None

    def places(self) -> Iterator[Place]:
        """From the lowest."""
        return iter(self._places)

    def _known(self) -> list[float]:
        """All sums, after the missing ones were added up."""
        sums = self._sums
        known = len(sums) - 1
        if known < len(self._seconds):
            sums += accumulate(self._seconds[known:], initial=sums.pop())
        return sums

    def validate(self) -> None:
        assert self._places == sorted(set(self._places))
        assert len(self._seconds) == len(self._places)
        assert self._known() == [0.0, *accumulate(self._seconds)]
