"""Which endpoint is closed when there are too many: SIEVE (Zhang et al., NSDI '24) over opaque keys.

Owns the order of the keys and one visited bit each. Its rule: a key in use is never evicted, so the
pool may exceed its cap while everything is busy, and `trim` brings it back later. Pure. Knows no
endpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(slots=True, eq=False)
class _Node(Generic[K]):
    key: K
    visited: bool = False
    newer: _Node[K] | None = None
    older: _Node[K] | None = None


class EndpointPool(Generic[K]):
    """Keys in order of insertion, with a hand that moves from old to new. Not thread-safe.

    A touch sets a bit and moves nothing. The hand clears the bits it passes and evicts the first idle
    key without one, so a key that was used once goes soon and one that is used again and again stays.
    `touch` and `remove` are O(1); `add` is, amortised, as long as few keys are busy.
    """

    def __init__(self, cap: int, busy: Callable[[K], bool] = lambda _: False) -> None:
        """`busy` is asked at eviction only."""
        assert cap >= 1
        self._cap = cap
        self._busy = busy
        self._nodes: dict[K, _Node[K]] = {}
        self._newest: _Node[K] | None = None
        self._oldest: _Node[K] | None = None
        self._hand: _Node[K] | None = None
        """The next candidate; None means the oldest."""
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: K) -> bool:
        return key in self._nodes

    def touch(self, key: K) -> None:
        """It was used. No-op for a key that is not in the pool."""
        node = self._nodes.get(key)
        if node is not None:
            node.visited = True

    def add(self, key: K) -> K | None:
        """Takes in a new key and returns the one that must go for it.

        None: there is room, or everything else is busy (then the pool is over its cap). A key that is
        already in the pool is touched.
        """
        if key in self._nodes:
            self.touch(key)
            return None
        evicted = self._evict() if len(self._nodes) >= self._cap else None
        self._append(key)
        return evicted

    def trim(self) -> list[K]:
        """Evicts what can go while the pool is over its cap; call it when something became idle."""
        evicted: list[K] = []
        while len(self._nodes) > self._cap:
            key = self._evict()
            if key is None:
                break
            evicted.append(key)
        return evicted

    def remove(self, key: K) -> None:
        """It is gone for another reason. No-op for a key that is not in the pool."""
        node = self._nodes.get(key)
        if node is not None:
            self._unlink(node)

    def validate(self) -> None:
        """Raises AssertionError unless list, index and hand agree."""
        seen: list[K] = []
        node, older = self._oldest, None
        while node is not None:
            assert node.older is older
            assert self._nodes[node.key] is node
            seen.append(node.key)
            node, older = node.newer, node
        assert older is self._newest
        assert len(seen) == len(self._nodes)
        assert self._hand is None or self._nodes.get(self._hand.key) is self._hand

    def _evict(self) -> K | None:
        """Two rounds are enough: the first clears every bit that could save an idle key."""
        node = self._hand or self._oldest
        for _ in range(2 * len(self._nodes)):
            assert node is not None
            if not self._busy(node.key):
                if not node.visited:
                    self._hand = node
                    self._unlink(node)
                    self.evictions += 1
                    return node.key
                node.visited = False
            node = node.newer or self._oldest
        return None

    def _append(self, key: K) -> None:
        node = self._nodes[key] = _Node(key, older=self._newest)
        if self._newest is None:
            self._oldest = node
        else:
            self._newest.newer = node
        self._newest = node

    def _unlink(self, node: _Node[K]) -> None:
        del self._nodes[node.key]
        if self._hand is node:
            self._hand = node.newer
        if node.older is None:
            self._oldest = node.newer
        else:
            node.older.newer = node.newer
        if node.newer is None:
            self._newest = node.older
        else:
            node.newer.older = node.older
