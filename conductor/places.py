"""The queue on paper of `conductor.returns`: how many have a place in each second that comes.

Pure; instants in monotonic seconds.

A place takes as much of a second as is *expected* of who has it. What is expected changes after places were given away:
where it turns out that one of four comes, three quarters of all that was promised is free again, and who asks next gets
a place between those that are there. They keep theirs, since `Retry-After` was told.
"""

from __future__ import annotations

from collections import defaultdict


class Places:
    """Second by second. A place longer than a second keeps those behind it free."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)  # by second; those that are over go
        self._second = 0  # of the last call
        self._carried_s = 0.0  # what those that are over take of it and what follows
        self._first = 0  # the first second that may have room, as of the beginning of `_second`
        self._left_s = 0.0  # what those before `_first` leave to it

    def take(self, earliest_at: float, place_s: float, now: float) -> float:
        """The end of the first free place of `place_s` that ends no sooner than `earliest_at`; it is taken."""
        self._turn_to(int(now), place_s)
        second, left_s = self._first, self._left_s
        while True:
            count = self._counts.get(second, 0)
            begun_s = left_s + count * place_s
            if second == self._second:
                begun_s = max(begun_s, now - second)
            has_room = begun_s + place_s <= max(1.0, place_s)
            if has_room and earliest_at <= second + 1:
                break
            second, left_s = second + 1, max(0.0, begun_s - 1.0)
            if not has_room:  # nor will it have any before the next turn
                self._first, self._left_s = second, left_s
        self._counts[second] += 1
        return max(earliest_at, second + begun_s + place_s)

    def clear(self) -> None:
        """Nobody has a place any more."""
        self._counts.clear()
        self._first, self._left_s, self._carried_s = self._second, 0.0, 0.0

    def _turn_to(self, second: int, place_s: float) -> None:
        """Once a second all is looked at again: places may have become shorter. What those of the seconds that are over
        still take of this one stays taken."""
        if second == self._second:
            return
        at, left_s = self._second, self._carried_s
        for past in sorted(each for each in self._counts if each < second):
            left_s = max(0.0, left_s - (past - at)) + self._counts.pop(past) * place_s
            at = past
        self._carried_s = max(0.0, left_s - (second - at))
        self._second = self._first = second
        self._left_s = self._carried_s
