"""Base class of eviction policies.

The catalog offers a block while it may be evicted (it has no hold, and no block that follows it is in its tier or a
faster one; see `kvstore.room`) and withdraws it otherwise. A policy therefore only orders the blocks on offer. It knows
blocks by their record (`kvstore.native.base`), which is reused once the block was forgotten. It knows neither sizes nor
leases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

from kvstore.native.base import Record, RecordArray
from kvstore.native.metadata import RankHeap
from protocol.keys import BlockKey


class Column:
    """Growing array of numbers by record, of one type code of `array`. Numbers that were never set are 0."""

    def __init__(self, typecode: str) -> None:
        self._values = array(typecode)

    def __getitem__(self, record: Record) -> int:
        return self._values[record] if 0 <= record < len(self._values) else 0

    def __setitem__(self, record: Record, value: int) -> None:
        if record < 0:
            raise IndexError(record)
        missing = record + 1 - len(self._values)
        if missing > 0:
            # `array` overallocates by a sixteenth, so this is amortized O(1).
            self._values.frombytes(bytes(missing * self._values.itemsize))
        self._values[record] = value

    @property
    def nbytes(self) -> int:
        return self._values.__sizeof__()


class EvictionPolicy(ABC):
    """Orders the records on offer for eviction: the smallest rank is evicted first. A policy sets the rank of a record,
    with `_place`, when it is stored or used. Every call costs O(log n) amortized, n = resident blocks.
    """

    def __init__(self) -> None:
        self._clock = 0  # counts uses; part of most ranks, to make them unique
        self._ranks = RankHeap()  # ranks of all resident records; the heap has those on offer

    @abstractmethod
    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        """Adds a new block, which counts as its first use. `parent` NO_RECORD = no resident parent."""

    @abstractmethod
    def used(self, record: Record) -> None:
        """Records that a block was read or requested again."""

    def used_all(self, records: RecordArray) -> None:
        """Records uses of many blocks, in order; a record may occur twice."""
        for record in records.tolist():
            self.used(record)

    def offer(self, record: Record) -> None:
        """Allows a record to be evicted; no-op if it is on offer."""
        self._ranks.offer(record)

    def withdraw(self, record: Record) -> None:
        """Forbids a record to be evicted; no-op if it is not on offer."""
        self._ranks.discard(record)

    def forget(self, record: Record) -> None:
        """Removes a record that has left; no-op if it was not there."""
        self._ranks.discard(record)

    def victim(self) -> Record:
        """Returns the record to evict first, which stays on offer until forgotten or withdrawn. NO_RECORD = none."""
        return self._ranks.first()

    @property
    def nbytes(self) -> int:
        """Memory in use by the policy, to a few percent."""
        return self._ranks.nbytes

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _place(self, record: Record, primary: float, secondary: int) -> None:
        self._ranks.rank(record, primary, secondary)
