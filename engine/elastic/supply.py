"""Where a worker's pages get their memory from: a share of what several have together, or as much as it likes. Pure."""

from __future__ import annotations

from typing import Protocol


class Supply(Protocol):
    """Counts pages. What is taken is the worker's until it is given back."""

    def take(self, count: int) -> int:
        """At most `count` pages, as many as can be had now."""

    def give(self, count: int) -> None:
        """The machine has so many back."""

    def room(self) -> int:
        """What `take` would give, as far as is known."""

    def most(self) -> int:
        """Pages that could ever be held, as floors are."""

    def want(self, count: int) -> None:
        """The worker waits for so many, until it says another number."""

    def spare(self, count: int) -> None:
        """So many of what it holds could be given back without anybody's loss but cached blocks'."""

    def asked_back(self) -> int:
        """Pages that others wait for and that this worker should give back, of those that are spare."""


class Unshared:
    """Nobody else wants the memory."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = self._left = num_pages

    def take(self, count: int) -> int:
        taken = min(count, self._left)
        self._left -= taken
        return taken

    def give(self, count: int) -> None:
        self._left += count

    def room(self) -> int:
        return self._left

    def most(self) -> int:
        return self._num_pages

    def want(self, count: int) -> None:
        """There is nobody to ask."""

    def spare(self, count: int) -> None:
        """Nobody needs to know."""

    def asked_back(self) -> int:
        return 0
