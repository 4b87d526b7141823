"""The frames of one budget that lie in no page. Pure.

Frames are numbered; a number stands for one piece of physical memory from when it is first used until it is retired,
and is never used for another, so that giving one back cannot be confused with using it again. Free ones are a stack:
what exists already is used again before anything new is made, and what is retired first was never made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.elastic.pages import Frame


class Frames:
    """As many as the budget has, and those above it that are still in use."""

    def __init__(self, count: int) -> None:
        self._wanted = 0
        self._next = 0
        self._free: list[Frame] = []
        self.num_alive = 0
        self._num_retired = 0  # that the machine does not have back yet
        self.resize(count)

    def __iter__(self) -> Iterator[Frame]:
        return iter(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_pending(self) -> int:
        """What is in use, or not given back to the machine yet, above the budget."""
        return max(0, self.num_alive - self._wanted) + self._num_retired

    def take(self, count: int) -> tuple[Frame, ...]:
        """Of which there must be enough."""
        if count > len(self._free):
            raise ValueError(f"{count} frames of {len(self._free)} free ones")
        return tuple(self._free.pop() for _ in range(count))

    def put_back(self, frames: Iterable[Frame]) -> None:
        self._free.extend(frames)

    def resize(self, count: int) -> None:
        """More are there at once; fewer as they come back (`retire`)."""
        self._wanted = count
        missing = max(0, count - self.num_alive)
        fresh = range(self._next, self._next + missing)
        self._free[:0] = reversed(fresh)
        self._next += missing
        self.num_alive += missing

    def retire(self, num_promised: int) -> tuple[Frame, ...]:
        """Frames that are too many and nobody was promised: no longer there. Report them as `given_back`."""
        count = min(self.num_alive - self._wanted, len(self._free) - num_promised)
        if count <= 0:
            return ()
        retired = tuple(self._free[:count])
        del self._free[:count]
        self.num_alive -= count
        self._num_retired += count
        return retired

    def given_back(self, count: int) -> None:
        self._num_retired -= count
