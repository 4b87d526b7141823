"""Which blocks placements lacked lately, where, and for how many seconds: demands over a sliding window. Pure.

A demand's seconds are shared evenly by the blocks that the store lacks of it. A block's own are then the sum over all
demands that pass through it, so that they never grow along a chain: what is worth having is always a leading part.
Bounded in number; beyond it the oldest demands are forgotten. Knows neither costs nor what follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from conductor.columns import Floats, Ints, Names
from conductor.replication.demand import Demand
from kvstore.directory.table import Slots, Table

MOST_DEMANDS = 4_096
"""With chains of 100 blocks a look at all of them takes a few milliseconds."""


class Wanted(NamedTuple):
    """Blocks that enough of the demands that were looked at passed through."""

    slots: Slots  # [blocks]
    hits: Floats  # [blocks]
    saved_s: Floats  # [stores, blocks]; meant of blocks that the store lacks


class DemandWindow:
    """The demands of the last `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._demands: deque[tuple[float, Demand]] = deque(maxlen=MOST_DEMANDS)

    def __len__(self) -> int:
        return len(self._demands)

    def add(self, demand: Demand, now: float) -> None:
        if demand.saved_s.any():
            self._demands.append((now, demand))

    def wanted(self, table: Table, stores: Names, least_hits: int, now: float) -> Wanted | None:
        """Over the demands that are about these stores and whose blocks are still known; None = no block has as many
        as `least_hits`."""
        while self._demands and self._demands[0][0] <= now - self._window_s:
            self._demands.popleft()
        demands = [d for _, d in self._demands if d.stores is stores and is_known(d, table)]
        if len(demands) < least_hits:
            return None
        slots, block = np.unique(np.concatenate([d.slots for d in demands]), return_inverse=True)
        # Each counts once, whatever it stands for: the first placement after a burst of others is not a hot prefix.
        hits = np.bincount(block)
        hot = np.flatnonzero(hits >= least_hits)
        if not hot.size:
            return None
        saved_s = _saved_by_block(demands, block, len(slots))
        return Wanted(slots[hot], hits[hot].astype(np.float64), saved_s[:, hot])

    def validate(self) -> None:
        times = [at for at, _ in self._demands]
        assert times == sorted(times), "demands are in order of time"
        assert len(times) <= MOST_DEMANDS
        for _, demand in self._demands:
            assert len(demand.slots) > 0
            assert len(demand.saved_s) == len(demand.missing) == len(demand.stores)
            assert (demand.saved_s >= 0).all()


def is_known(demand: Demand, table: Table) -> bool:
    """Rows are used again, and a chain loses its tail first."""
    return table.key(int(demand.slots[-1])) == demand.leaf


def _saved_by_block(demands: Sequence[Demand], block: Ints, num_blocks: int) -> Floats:
    """`block`: the number of each block of each demand, one after the other. Shape [stores, blocks]."""
    lengths = np.array([len(d.slots) for d in demands])
    missing = np.maximum(np.stack([d.missing for d in demands]), 1)
    share_s = np.stack([d.weight * d.saved_s for d in demands]) / missing
    saved_s = np.zeros((share_s.shape[1], num_blocks))
    for store in np.flatnonzero(share_s.any(axis=0)):
        weights = np.repeat(share_s[:, store], lengths)
        saved_s[store] = np.bincount(block, weights, num_blocks)
    return saved_s
