"""Seconds in an order, with the sum before any place, and how many come after it: sorted columns. Pure.

Sums are added up from the first place and never subtracted, so that no rounding error is left behind; only those behind
the last change are made anew, when somebody asks. A change at the end, the usual one, is O(log n), elsewhere it moves
and adds what lies behind: for a thousand entries 25 µs at worst, and for the dozens that are usual a tree took longer.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate

Place = tuple[float, int]  # rank, then number


class OrderedSums:
    """Entries at places that are all different."""

    __slots__ = ("_numbers", "_ranks", "_seconds", "_sums")

    def __init__(self) -> None:
        self._ranks = array("d")
        self._numbers = array("q")
        self._seconds = array("d")
        self._sums = array("d", [0.0])  # before each place and at the end, as far as they are known

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def total(self) -> float:
        return self._known()[-1]

    def add(self, place: Place, seconds: float) -> None:
        at = self._find(place)
        self._ranks.insert(at, place[0])
        self._numbers.insert(at, place[1])
        self._seconds.insert(at, seconds)
        del self._sums[at + 1 :]

    def remove(self, place: Place) -> None:
        """The place must be taken."""
        at = self._find(place)
        assert (self._ranks[at], self._numbers[at]) == place, "nothing is there"
        del self._ranks[at], self._numbers[at], self._seconds[at], self._sums[at + 1 :]

    def before(self, place: Place) -> float:
        """Seconds of all entries at lower places."""
        return self._known()[self._find(place)]

    def around(self, place: Place) -> tuple[float, int]:
        """Seconds of all entries at lower places, and the number of those at higher ones; this place is free."""
        at = self._find(place)
        return self._known()[at], len(self._ranks) - at

    def first(self) -> Place | None:
        """The lowest place; None when there is none."""
        return (self._ranks[0], self._numbers[0]) if self._ranks else None

    def places(self) -> Iterator[Place]:
        """From the lowest."""
        return zip(self._ranks, self._numbers, strict=True)

    def columns(self) -> tuple[int, int, int]:
        """Addresses of all ranks and of the sums before each and of all, and the number of entries: until the next
        change."""
        sums = self._known()
        return self._ranks.buffer_info()[0], sums.buffer_info()[0], len(self._ranks)

    def _find(self, place: Place) -> int:
        """Where it is or belongs."""
        rank, number = place
        low = bisect_left(self._ranks, rank)
        high = bisect_right(self._ranks, rank, low)
        return low if low == high else bisect_left(self._numbers, number, low, high)

    def _known(self) -> array[float]:
        """All sums, after the missing ones were added up."""
        sums = self._sums
        known = len(sums) - 1
        if known < len(self._seconds):
            sums.extend(accumulate(self._seconds[known:], initial=sums.pop()))
        return sums

    def validate(self) -> None:
        places = list(self.places())
        assert places == sorted(set(places))
        assert len(self._seconds) == len(places)
        assert self._known().tolist() == [0.0, *accumulate(self._seconds)]
