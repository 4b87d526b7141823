"""Least frequently used, with counts that age; among equals, what was used longest ago goes first.

Plain counts never fall, so what was popular yesterday would stay for ever. Dynamic ageing (LFU-DA; Arlitt, Cherkasova,
Dilley, Friedrich, Jin: "Evaluating content management techniques for Web proxy caches", 2000) ages everything
at once without touching it: a block's worth is its count plus the worth of the last victim at its last use, so that new
blocks catch up with old counts at the pace of eviction.
"""

from __future__ import annotations

from kvstore.eviction.columns import Column
from kvstore.eviction.ranked import Ranked
from kvstore.native.base import NO_RECORD, Record
from protocol.keys import BlockKey

MAX_USES = 2**32 - 1
"""What a column holds."""


class LeastFrequentlyUsed(Ranked):
    """LFU-DA."""

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
