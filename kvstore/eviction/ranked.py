"""What policies share that give each record a rank when it is used: the smallest rank on offer goes first."""

from __future__ import annotations

from kvstore.native.base import Record, RecordArray
from kvstore.native.library import rank_heap


class Ranked:
    """All of a policy but `added` and `used`, which call `_place`."""

    def __init__(self) -> None:
        self._clock = 0  # counts uses; part of most ranks, since it makes them differ
        self._ranks = rank_heap()  # of every resident record; in the heap are those on offer

    def used(self, record: Record) -> None:
        raise NotImplementedError

    def used_all(self, records: RecordArray) -> None:
        for record in records.tolist():
            self.used(record)

    def offer(self, record: Record) -> None:
        self._ranks.offer(record)

    def withdraw(self, record: Record) -> None:
        self._ranks.discard(record)

    def forget(self, record: Record) -> None:
        self._ranks.discard(record)

    def victim(self) -> Record:
        return self._ranks.first()

    @property
    def nbytes(self) -> int:
        return self._ranks.nbytes

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _place(self, record: Record, primary: float, secondary: int) -> None:
        self._ranks.rank(record, primary, secondary)
