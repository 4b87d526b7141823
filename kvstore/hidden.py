"""What is left of objects that were removed while somebody held them: space, until the last hold ends. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Remains:
    """Of one object."""

    offset: int | None  # None = it was not in memory
    length: int
    holds: int


class Hidden:
    """By generation, since a key may be hidden more than once."""

    def __init__(self) -> None:
        self._remains: dict[int, Remains] = {}

    def __contains__(self, generation: object) -> bool:
        return generation in self._remains

    def add(self, generation: int, remains: Remains) -> None:
        self._remains[generation] = remains

    def let_go(self, generation: int) -> tuple[int, int] | None:
        """One hold less; gives (offset, length) of the memory that is free with the last one."""
        remains = self._remains[generation]
        remains.holds -= 1
        if remains.holds:
            return None
        del self._remains[generation]
        return None if remains.offset is None else (remains.offset, remains.length)

    def extents(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of the memory that is still held."""
        for remains in self._remains.values():
            if remains.offset is not None:
                yield remains.offset, remains.length

    def holds(self) -> Counter[int]:
        """By generation."""
        return Counter({g: remains.holds for g, remains in self._remains.items()})
