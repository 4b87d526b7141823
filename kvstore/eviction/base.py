"""What the catalog asks of an eviction policy.

The catalog offers a block once it may be evicted (nobody reads it, and no block that follows it in its chain is
resident) and withdraws it when that ceases to be so. A policy therefore only orders what is offered, whatever the
reason. It knows blocks by their record (`kvstore.native.base`), which another block may get once it was forgotten.
It knows neither sizes nor leases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

from kvstore.native.base import Record, RecordArray
from kvstore.native.metadata import RankHeap
from protocol.keys import BlockKey


class Column:
    """Small numbers by record, without an object for each; of one type code of `array`, 0 where none was set."""

    def __init__(self, typecode: str) -> None:
        self._values = array(typecode)

    def __getitem__(self, record: Record) -> int:
        return self._values[record] if 0 <= record < len(self._values) else 0

    def __setitem__(self, record: Record, value: int) -> None:
        if record < 0:
            raise IndexError(record)
        missing = record + 1 - len(self._values)
        if missing > 0:
            # `array` itself keeps room for a sixteenth more, so this costs O(1) in the long run.
            self._values.frombytes(bytes(missing * self._values.itemsize))
        self._values[record] = value

    @property
    def nbytes(self) -> int:
        return self._values.__sizeof__()


class EvictionPolicy(ABC):
    """The order of eviction among the records on offer: the smallest rank goes first. A policy gives a record its rank,
    by `_place`, when it is stored or used. Every call costs O(log n) amortized, n = resident blocks.
    """

    def __init__(self) -> None:
        self._clock = 0  # counts uses; part of most ranks, since it makes them differ
        self._ranks = RankHeap()  # of every resident record; in the heap are those on offer

    @abstractmethod
    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        """The block is new here, which is its first use. `parent` precedes it; NO_RECORD = it is not resident."""

    @abstractmethod
    def used(self, record: Record) -> None:
        """The block, which was added, was read or asked for again."""

    def used_all(self, records: RecordArray) -> None:
        """As `used` for each in order; one may come twice."""
        for record in records.tolist():
            self.used(record)

    def offer(self, record: Record) -> None:
        """It may be evicted from now on; no-op when it is on offer."""
        self._ranks.offer(record)

    def withdraw(self, record: Record) -> None:
        """It may not be evicted for now; no-op when it is not on offer."""
        self._ranks.discard(record)

    def forget(self, record: Record) -> None:
        """It left; no-op when it was not there."""
        self._ranks.discard(record)

    def victim(self) -> Record:
        """What to evict first; it stays on offer until forgotten or withdrawn. NO_RECORD = nothing is on offer."""
        return self._ranks.first()

    @property
    def nbytes(self) -> int:
        """Memory that the policy takes now, to a few percent."""
        return self._ranks.nbytes

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _place(self, record: Record, primary: float, secondary: int) -> None:
        self._ranks.rank(record, primary, secondary)
