"""Hits against cache capacity for LRU, all capacities in one pass (FAST'25, figure 9; Mattson's stack distances, 1970).

A request uses its chain from the tail to the head, so a block is never used longer ago than the blocks behind it. Hence
what a cache of C blocks holds is the C blocks used last, for every C at once (inclusion); these are always whole
prefixes, and leaf-first LRU as the store has it evicts the same: a test compares the hits with those of its catalog.

All blocks that one request used last lie together in the stack. So a tree of counts per request is enough, and a chain
costs O(its runs · log requests) instead of O(its blocks · log blocks). Partial last blocks take up a block of the cache
and are no hits. A chain longer than the cache hits as far as the cache reaches. Knows nothing of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traces.analysis.prefixes import Ints, PrefixTree, Visit


class _Counts:
    """Numbers at positions 0 … size − 1 with sums over ends in O(log size) (Fenwick, 1994)."""

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
        """The sum behind `position`."""
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
        """Hits in tokens as a share of all prompt tokens; None: everything fits."""
        last = len(self.hits) - 1
        blocks = last if capacity_tokens is None else capacity_tokens // self.tokens_per_block
        return int(self.hits[min(blocks, last)]) * self.tokens_per_block / self.input_tokens

    def distance_percentile(self, percent: float) -> int | None:
        """Distinct tokens used from one use of a block to the next, in `percent` of all hits at most."""
        total = int(self.hits[-1])
        if not total:
            return None
        blocks = int(np.searchsorted(self.hits, percent / 100 * total))
        return blocks * self.tokens_per_block


def hit_curve(tree: PrefixTree, *, input_tokens: int, tokens_per_block: int) -> HitCurve:
    """Raises nothing; an empty tree has a curve of zeros."""
    rises = np.zeros(tree.num_blocks + 2, dtype=np.int64)  # of the number of hits at a distance
    counts = _Counts(len(tree.visits))
    for request, visit in enumerate(tree.visits):
        for distance, length in _distances(counts, visit):
            rises[distance] += 1
            rises[distance + length] -= 1
        _use(counts, request, visit)
    at_distance = np.cumsum(rises)
    return HitCurve(np.cumsum(at_distance)[:-1], input_tokens, tokens_per_block)


def _distances(counts: _Counts, visit: Visit) -> Sequence[tuple[int, int]]:
    """Runs of usable blocks: the first one's stack distance (1: used last of all), their number."""
    found = []
    for run in visit.runs:
        length = min(run.begin + run.length, visit.usable) - run.begin
        if length > 0:
            # Before the run lie the blocks of later requests, this chain's head among them.
            found.append((counts.after(run.last_request) + 1, length))
    return found


def _use(counts: _Counts, request: int, visit: Visit) -> None:
    for run in visit.runs:
        counts.add(run.last_request, -run.length)
    counts.add(request, len(visit.blocks))
