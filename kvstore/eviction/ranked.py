"""Eviction policies that rank by the time and the number of uses: LRU, FIFO, LFU, length-aware."""

from __future__ import annotations

from kvstore.eviction.base import Column, EvictionPolicy
from kvstore.native.base import NO_RECORD, Record, RecordArray
from protocol.keys import BlockKey


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the least recently used block first.

    Suits loads where the chance of another use falls with the time since the last one.
    """

    name = "lru"

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        self.used(record)

    def used(self, record: Record) -> None:
        self._place(record, 0, self._tick())

    def used_all(self, records: RecordArray) -> None:
        self._ranks.rank_all(records, self._clock + 1)
        self._clock += len(records)


class FirstInFirstOut(EvictionPolicy):
    """Evicts the oldest block first. A baseline: a policy that counts uses has to beat it."""

    name = "fifo"

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        self._place(record, 0, self._tick())

    def used(self, record: Record) -> None:
        """Ignored: uses do not change the order."""

    def used_all(self, records: RecordArray) -> None:
        """Ignored: uses do not change the order."""


MAX_USES = 2**32 - 1
"""The largest number in a column."""


class LeastFrequentlyUsed(EvictionPolicy):
    """Evicts the least used block first, with aging counts (LFU-DA). Among equals, the least recently used first."""

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._num_uses = Column("I")  # of resident records
        self._age = 0.0  # rank of the last victim
        self._named = NO_RECORD  # the last victim, until it is forgotten

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        self.used(record)

    def used(self, record: Record) -> None:
        self._num_uses[record] = min(self._num_uses[record] + 1, MAX_USES)
        self._place(record, self._age + self._num_uses[record], self._tie(record))

    def victim(self) -> Record:
        self._named = super().victim()
        return self._named

    def forget(self, record: Record) -> None:
        if record == self._named:
            # The maximum, since ages never fall: a parent may be evicted long after its rank became low.
            self._age = max(self._age, self._ranks.rank_of(record)[0])
            self._named = NO_RECORD
        self._num_uses[record] = 0
        super().forget(record)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._num_uses.nbytes

    def _tie(self, record: Record) -> int:
        """Returns the secondary rank: among blocks of equal primary rank, the lowest is evicted first."""
        return self._tick()


MAX_DEPTH = 2**20 - 1
"""Deeper blocks count as this deep."""
TICKS = 2**44
"""Range of the clock in the lower bits of a 64-bit rank: five years at 100,000 uses a second."""


class LengthAware(LeastFrequentlyUsed):
    """Evicts like LFU, but among equals the block that is deeper in its chain first.

    Source: Mooncake, FAST'25, table of cache policies.
    """

    name = "length-aware"

    def __init__(self) -> None:
        super().__init__()
        self._depths = Column("I")  # 1 = head of its chain, 0 = not resident

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        # If the parent is absent, the depth is unknown; 1 keeps the block longest.
        self._depths[record] = min(self._depths[parent] + 1, MAX_DEPTH)
        super().added(record, key, parent)

    def forget(self, record: Record) -> None:
        super().forget(record)
        self._depths[record] = 0

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._depths.nbytes

    def _tie(self, record: Record) -> int:
        return (MAX_DEPTH - self._depths[record]) * TICKS + self._tick() % TICKS
