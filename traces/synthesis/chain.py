"""The hash ids of a prompt as runs of neighbouring numbers, and who hands out new ids.

Ids are handed out as they are first written, so they are dense and a new block's neighbours are its chain. Rule of the
format: an id is only ever behind the same id, so a chain is made from the head of another one and from new ids, never
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chain:
    """`runs`: (first id, number of ids); `length`: all ids."""

    runs: tuple[tuple[int, int], ...] = ()
    length: int = 0

    def head(self, length: int) -> Chain:
        """The leading `length` ids. Raises ValueError when there are fewer."""
        if length > self.length:
            raise ValueError(f"a chain of {self.length} ids has no head of {length}")
        runs: list[tuple[int, int]] = []
        missing = length
        for first, count in self.runs:
            if not missing:
                break
            runs.append((first, min(count, missing)))
            missing -= runs[-1][1]
        return Chain(tuple(runs), length)

    def ids(self) -> Iterator[int]:
        """All ids, from the head on."""
        for first, count in self.runs:
            yield from range(first, first + count)


class BlockIds:
    """Hands out ids from 0 up."""

    def __init__(self) -> None:
        self._next = 0

    def extend(self, chain: Chain, count: int) -> Chain:
        """The chain with `count` new ids behind it."""
        if not count:
            return chain
        first, self._next = self._next, self._next + count
        runs = chain.runs
        if runs and sum(runs[-1]) == first:
            runs, first, count_of_run = runs[:-1], runs[-1][0], runs[-1][1] + count
        else:
            count_of_run = count
        return Chain((*runs, (first, count_of_run)), chain.length + count)
