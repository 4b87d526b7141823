"""Which object goes first when space is needed. Pure; knows keys and their use, not sizes, chains or leases.

The state offers a key once it may be evicted (nobody reads it, and no block that follows it in its chain is resident)
and withdraws it when that ceases to be so. A policy therefore only orders what is offered, whatever the reason.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from protocol.keys import BlockKey

_COMPACT_AT_LEAST = 64  # smaller heaps are not worth rebuilding


class EvictionPolicy(Protocol):
    """The order of eviction among the keys on offer."""

    def used(self, key: BlockKey) -> None:
        """`key` is new, was read, or was asked for again."""

    def offer(self, key: BlockKey) -> None:
        """`key` may be evicted from now on; no-op when it is on offer."""

    def withdraw(self, key: BlockKey) -> None:
        """`key` may not be evicted for now; no-op when it is not on offer."""

    def forget(self, key: BlockKey) -> None:
        """`key` left the store."""

    def victim(self) -> BlockKey | None:
        """The key on offer to evict first; it stays on offer until forgotten. None = nothing is on offer."""


class LeastRecentlyUsed:
    """Evicts what was used longest ago."""

    def __init__(self) -> None:
        self._clock = 0  # counts uses
        self._used_at: dict[BlockKey, int] = {}
        self._offered: set[BlockKey] = set()
        self._heap: list[
            tuple[int, BlockKey]
        ] = []  # outdated entries are skipped when they surface

    def used(self, key: BlockKey) -> None:
        self._clock += 1
        self._used_at[key] = self._clock
        if key in self._offered:
            self._push(key)

    def offer(self, key: BlockKey) -> None:
        if key not in self._offered:
            self._offered.add(key)
            self._push(key)

    def withdraw(self, key: BlockKey) -> None:
        self._offered.discard(key)

    def forget(self, key: BlockKey) -> None:
        self._offered.discard(key)
        self._used_at.pop(key, None)

    def victim(self) -> BlockKey | None:
        while self._heap:
            entry = self._heap[0]
            if self._is_current(entry):
                return entry[1]
            heapq.heappop(self._heap)
        return None

    def _push(self, key: BlockKey) -> None:
        heapq.heappush(self._heap, (self._used_at[key], key))
        if len(self._heap) > max(_COMPACT_AT_LEAST, 2 * len(self._offered)):
            self._heap = [(self._used_at[key], key) for key in self._offered]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[int, BlockKey]) -> bool:
        used_at, key = entry
        return key in self._offered and self._used_at[key] == used_at
