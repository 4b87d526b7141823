"""Counts how often blocks were read, over a sliding window. Pure: `now` is an argument.

Hits are counted in slices of the window, so that a hit counts for at least nine tenths of it. Memory is bounded: if too
many blocks are counted, the coldest are forgotten. Does not know who holds a block, nor how heat is used.
"""

from collections import Counter, deque

from moonserve.protocol.kv_blocks import BlockKey, iter_keys

NUM_SLICES = 10
MAX_KEYS = 200_000
"""Limit of the blocks that are counted; about 40 MB."""


class Heat:
    """Hits per block. A block is *hot* if it has at least `threshold` hits within `window_s`."""

    def __init__(self, *, threshold: int = 8, window_s: float = 10.0, max_keys: int = MAX_KEYS) -> None:
        self._threshold = threshold
        self._slice_s = window_s / NUM_SLICES
        self._max_keys = max_keys
        self._slices: deque[tuple[int, Counter[BlockKey]]] = deque()  # (number, hits), oldest first
        self._totals: Counter[BlockKey] = Counter()
        self._hot: set[BlockKey] = set()
        self._last_hit_at: dict[BlockKey, float] = {}  # watched blocks only

    def __len__(self) -> int:
        """Number of blocks that are counted."""
        return len(self._totals)

    def record(self, packed_keys: bytes, now: float) -> None:
        """Counts reads of blocks, one per occurrence of a key."""
        self._advance(now)
        hits = Counter(iter_keys(packed_keys))
        self._slices[-1][1].update(hits)
        self._totals.update(hits)
        for key in hits:
            if self._totals[key] >= self._threshold:
                self._hot.add(key)
            if key in self._last_hit_at:
                self._last_hit_at[key] = now
        if len(self._totals) > self._max_keys:
            self._forget_coldest()

    def hot(self, now: float) -> list[BlockKey]:
        """Returns the hot blocks, hottest first."""
        self._advance(now)
        return sorted(self._hot, key=lambda key: (-self._totals[key], key))

    def hits(self, key: BlockKey, now: float) -> int:
        """Returns the hits of a block within the window."""
        self._advance(now)
        return self._totals[key]

    def watch(self, key: BlockKey, now: float) -> None:
        """Starts to remember the last hit of a block beyond the window. The watch itself counts as a hit."""
        self._last_hit_at[key] = now

    def unwatch(self, key: BlockKey) -> None:
        self._last_hit_at.pop(key, None)

    def last_hit_at(self, key: BlockKey) -> float:
        """Returns the time of the last hit of a watched block."""
        return self._last_hit_at[key]

    def validate(self) -> None:
        """Raises AssertionError if the slices do not add up."""
        totals: Counter[BlockKey] = Counter()
        for _, hits in self._slices:
            totals.update(hits)
        assert totals == self._totals, "the slices do not add up"
        assert self._hot == {key for key, n in totals.items() if n >= self._threshold}

    def _advance(self, now: float) -> None:
        """Opens the slice of `now` and subtracts those that have left the window."""
        number = int(now // self._slice_s)
        if not self._slices or number > self._slices[-1][0]:
            self._slices.append((number, Counter()))
        while self._slices[0][0] <= self._slices[-1][0] - NUM_SLICES:
            self._take_back(self._slices.popleft()[1])

    def _take_back(self, hits: Counter[BlockKey]) -> None:
        for key, count in hits.items():
            left = self._totals[key] - count
            if left:
                self._totals[key] = left
            else:
                del self._totals[key]
            if left < self._threshold:
                self._hot.discard(key)

    def _forget_coldest(self) -> None:
        """Keeps the hottest half of the limit, so that this runs rarely."""
        kept = dict(self._totals.most_common(self._max_keys // 2))
        self._totals = Counter(kept)
        self._hot &= kept.keys()
        for _, hits in self._slices:
            for key in [key for key in hits if key not in kept]:
                del hits[key]
