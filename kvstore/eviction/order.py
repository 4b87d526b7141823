"""Keys in order of rank, in memory proportional to their number. Knows nothing about what ranks mean."""

from __future__ import annotations

import heapq

from protocol.keys import BlockKey

COMPACT_AT_LEAST = 64
"""Smaller heaps are not worth rebuilding."""

Rank = tuple[float, ...]


class Order:
    """A heap whose outdated entries are skipped when they surface, and dropped when they are the majority."""

    def __init__(self) -> None:
        self._ranks: dict[BlockKey, Rank] = {}
        self._heap: list[tuple[Rank, BlockKey]] = []

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._ranks

    def put(self, key: BlockKey, rank: Rank) -> None:
        """Adds `key`, or moves it."""
        self._ranks[key] = rank
        heapq.heappush(self._heap, (rank, key))
        self._compact()

    def discard(self, key: BlockKey) -> None:
        if self._ranks.pop(key, None) is not None:
            self._compact()

    def first(self) -> BlockKey | None:
        """The key of the smallest rank."""
        while self._heap:
            rank, key = self._heap[0]
            if self._ranks.get(key) == rank:
                return key
            heapq.heappop(self._heap)
        return None

    def _compact(self) -> None:
        if len(self._heap) > max(COMPACT_AT_LEAST, 2 * len(self._ranks)):
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)
