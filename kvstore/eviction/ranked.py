"""The policies that rank by the time and the number of uses."""

from __future__ import annotations

from kvstore.eviction.base import Column, EvictionPolicy
from kvstore.native.base import NO_RECORD, Record, RecordArray
from protocol.keys import BlockKey


class LeastRecentlyUsed(EvictionPolicy):
    """What was used longest ago goes first.

    Right when the chance of another use falls with the time since the last one.
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
    """What was stored longest ago goes first. A policy that looks at uses has to beat it."""

    name = "fifo"

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        self._place(record, 0, self._tick())

    def used(self, record: Record) -> None:
        """Changes nothing."""

    def used_all(self, records: RecordArray) -> None:
        """Changes nothing."""


MAX_USES = 2**32 - 1
"""What a column holds."""


class LeastFrequentlyUsed(EvictionPolicy):
    """What was used least goes first, with counts that age (LFU-DA); among equals, what was used longest ago."""

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._num_uses = Column("I")  # of resident records
        self._age = 0.0  # worth of the last victim
        self._named = NO_RECORD  # the victim, until it is gone

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
            # A parent may have become worthless long before its followers left: ages never fall.
            self._age = max(self._age, self._ranks.rank_of(record)[0])
            self._named = NO_RECORD
        self._num_uses[record] = 0
        super().forget(record)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._num_uses.nbytes

    def _tie(self, record: Record) -> int:
        """Which of two blocks of one worth goes first: the one with the lower number."""
        return self._tick()


MAX_DEPTH = 2**20 - 1
"""Deeper ones count as this deep."""
TICKS = 2**44
"""The rest of a rank's 64 bits: five years at 100,000 uses a second."""


class LengthAware(LeastFrequentlyUsed):
    """Like LFU, but among equals the block that is deeper in its chain goes first.

    Source: Mooncake, FAST'25, table of cache policies.
    """

    name = "length-aware"

    def __init__(self) -> None:
        super().__init__()
        self._depths = Column("I")  # of residents; 1 = the head of its chain, 0 = not resident

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        # A parent that is not here yet or not any more leaves the depth unknown; 1 keeps the block longest.
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
