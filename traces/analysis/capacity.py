"""LRU hits for all cache capacities in one pass (FAST'25, figure 9; Mattson's stack distances, 1970).

A request uses its chain from tail to head, so a block's last use is never older than that of the blocks after it. Hence
a cache of C blocks holds the C blocks used last, for every C at once (inclusion). They are always whole prefixes, and
the store's leaf-first LRU evicts the same blocks: a test compares the hits with those of its catalog.

Blocks last used by the same request are adjacent in the stack. So a tree of counts per request suffices, and a chain
costs O(runs · log requests) instead of O(blocks · log blocks). A partial last block occupies a block of the cache and
is no hit. A chain longer than the cache hits as far as the cache reaches. Does not know time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traces.analysis.prefixes import Ints, PrefixTree, Visit


class _Counts:
    """Counts at positions 0 … size − 1 with suffix sums in O(log size) (Fenwick, 1994)."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)
        self.total = 0

    def add(self, position: int, count: int) -> None:
        self.total += count
        index = position + 1
        while index < len(self._sums):
            self._sums[index] += count
            index += index & -index

    def after(self, position: int) -> int:
        """Returns the sum of the counts after `position`."""
        index = position + 1
        before = 0
        while index:
            before += self._sums[index]
            index &= index - 1
        return self.total - before


@dataclass(frozen=True, slots=True)
class HitCurve:
    """`hits[c]`: full blocks that an LRU cache of c blocks supplies over the whole trace, c from 0."""

    hits: Ints
    input_tokens: int
    tokens_per_block: int

    def ratio(self, capacity_tokens: int | None) -> float:
        """Returns the hits in tokens as a share of all prompt tokens. None = unlimited capacity."""
        last = len(self.hits) - 1
        blocks = last if capacity_tokens is None else capacity_tokens // self.tokens_per_block
        return int(self.hits[min(blocks, last)]) * self.tokens_per_block / self.input_tokens

    def distance_percentile(self, percent: float) -> int | None:
        """Returns the reuse distance (distinct tokens) that `percent` of all hits do not exceed; None without hits."""
        total = int(self.hits[-1])
        if not total:
            return None
        blocks = int(np.searchsorted(self.hits, percent / 100 * total))
        return blocks * self.tokens_per_block


def hit_curve(tree: PrefixTree, *, input_tokens: int, tokens_per_block: int) -> HitCurve:
    """Returns the hit curve of a tree. An empty tree has a curve of zeros."""
    rises = np.zeros(tree.num_blocks + 2, dtype=np.int64)  # differences of the number of hits by stack distance
    counts = _Counts(len(tree.visits))
    for request, visit in enumerate(tree.visits):
        for distance, length in _distances(counts, visit):
            rises[distance] += 1
            rises[distance + length] -= 1
        _use(counts, request, visit)
    at_distance = np.cumsum(rises)
    return HitCurve(np.cumsum(at_distance)[:-1], input_tokens, tokens_per_block)


def _distances(counts: _Counts, visit: Visit) -> Sequence[tuple[int, int]]:
    """Returns (stack distance of the first block, length) of each run of usable blocks. Distance 1 = used last."""
    found = []
    for run in visit.runs:
        length = min(run.begin + run.length, visit.usable) - run.begin
        if length > 0:
            # Above the run in the stack are the blocks of later requests, including the head of this chain.
            found.append((counts.after(run.last_request) + 1, length))
    return found


def _use(counts: _Counts, request: int, visit: Visit) -> None:
    for run in visit.runs:
        counts.add(run.last_request, -run.length)
    counts.add(request, len(visit.blocks))
