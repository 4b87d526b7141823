"""Seconds in an order, with the sum before any place, and how many come after it, in O(log n): a treap. Pure.

Priorities are a hash of the entry's number, so that equal histories give equal trees. Sums are added up from the
children at every change and never subtracted, so that no rounding error is left behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Place = tuple[float, int]  # rank, then number


@dataclass(slots=True, eq=False)
class _Node:
    place: Place
    seconds: float
    priority: int
    total: float  # of the whole subtree
    count: int = 1  # likewise
    left: _Node | None = None
    right: _Node | None = None


class OrderedSums:
    """Entries at places that are all different."""

    def __init__(self) -> None:
        self._root: _Node | None = None

    @property
    def total(self) -> float:
        return _total(self._root)

    def add(self, place: Place, seconds: float) -> None:
        before, after = _split(self._root, place)
        node = _Node(place, seconds, _hash(place[1]), seconds)
        self._root = _merge(_merge(before, node), after)

    def remove(self, place: Place) -> None:
        """The place must be taken."""
        before, rest = _split(self._root, place)
        _, after = _split(rest, (place[0], place[1] + 1))
        self._root = _merge(before, after)

    def before(self, place: Place) -> float:
        """Seconds of all entries at lower places."""
        seconds, node = 0.0, self._root
        while node is not None:
            if node.place < place:
                seconds += _total(node.left) + node.seconds
                node = node.right
            else:
                node = node.left
        return seconds

    def around(self, place: Place) -> tuple[float, int]:
        """Seconds of all entries at lower places, and the number of those at higher ones; this place is free."""
        seconds, number, node = 0.0, 0, self._root
        while node is not None:
            if node.place < place:
                seconds += _total(node.left) + node.seconds
                node = node.right
            else:
                number += _count(node.right) + 1
                node = node.left
        return seconds, number

    def first(self) -> Place | None:
        """The lowest place; None when there is none."""
        node = self._root
        while node is not None and node.left is not None:
            node = node.left
        return None if node is None else node.place

    def places(self) -> Iterator[Place]:
        """From the lowest."""
        above: list[_Node] = []
        node = self._root
        while above or node is not None:
            while node is not None:
                above.append(node)
                node = node.left
            node = above.pop()
            yield node.place
            node = node.right

    def validate(self) -> None:
        places = _validate(self._root)
        assert places == sorted(set(places))


def _total(node: _Node | None) -> float:
    return 0.0 if node is None else node.total


def _count(node: _Node | None) -> int:
    return 0 if node is None else node.count


def _sum(node: _Node) -> _Node:
    node.total = _total(node.left) + node.seconds + _total(node.right)
    node.count = _count(node.left) + 1 + _count(node.right)
    return node


def _split(node: _Node | None, place: Place) -> tuple[_Node | None, _Node | None]:
    """Entries below the place, and the others."""
    if node is None:
        return None, None
    if node.place < place:
        node.right, rest = _split(node.right, place)
        return _sum(node), rest
    below, node.left = _split(node.left, place)
    return below, _sum(node)


def _merge(low: _Node | None, high: _Node | None) -> _Node | None:
    """All places of `low` are below all of `high`."""
    if low is None or high is None:
        return low or high
    if low.priority > high.priority:
        low.right = _merge(low.right, high)
        return _sum(low)
    high.left = _merge(low, high.left)
    return _sum(high)


def _hash(number: int) -> int:
    """splitmix64 (Steele, Lea & Flood 2014)."""
    mask = (1 << 64) - 1
    value = (number * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def _validate(node: _Node | None) -> list[Place]:
    if node is None:
        return []
    for child in (node.left, node.right):
        assert child is None or child.priority <= node.priority
    assert node.total == _total(node.left) + node.seconds + _total(node.right)
    assert node.count == _count(node.left) + 1 + _count(node.right)
    return [*_validate(node.left), node.place, *_validate(node.right)]
