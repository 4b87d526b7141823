"""`RankHeap` over the compiled library. Its rule is that of `compiled`."""

from __future__ import annotations

import ctypes
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.native.base import MAX_RECORDS, NO_RECORD, Record, RecordArray
from kvstore.native.prototypes import HeapLibrary, HeapState
from transfer.native.base import address_of

_MIN_ROOM = 64
Number = TypeVar("Number", bound=np.generic)


class NativeRankHeap:
    """`RankHeap`: columns indexed by record, and the records on offer in the order of a heap."""

    def __init__(self, library: HeapLibrary) -> None:
        self._library = library
        self._records = np.zeros(0, np.uint32)
        self._positions = np.zeros(0, np.uint32)
        self._secondaries = np.zeros(0, np.uint64)
        self._primaries: npt.NDArray[np.float64] | None = None  # made when one is not 0
        self._heap = HeapState()
        self._at = ctypes.addressof(self._heap)

    @property
    def nbytes(self) -> int:
        primaries = 0 if self._primaries is None else self._primaries.nbytes
        return self._records.nbytes + self._positions.nbytes + self._secondaries.nbytes + primaries

    def __len__(self) -> int:
        return int(self._heap.count)

    def __contains__(self, record: object) -> bool:
        if not isinstance(record, int) or not 0 <= record < len(self._positions):
            return False
        return bool(self._positions[record])

    def put(self, record: Record, primary: float, secondary: int) -> None:
        self.rank(record, primary, secondary)
        self.offer(record)

    def rank(self, record: Record, primary: float, secondary: int) -> None:
        check_record(record)
        while not self._library.heap_rank(self._at, record, primary, secondary):
            self._widen(record, primary)

    def rank_all(self, records: RecordArray, secondary: int) -> None:
        if not len(records):
            return
        check_record(int(records.min()))
        check_record(highest := int(records.max()))
        if highest >= self._heap.num_records:
            self._widen(highest, 0.0)
        records = np.ascontiguousarray(records)
        self._library.heap_rank_all(self._at, address_of(records), len(records), secondary)

    def rank_of(self, record: Record) -> tuple[float, int]:
        primary = 0.0 if self._primaries is None else float(self._primaries[record])
        return primary, int(self._secondaries[record])

    def offer(self, record: Record) -> None:
        check_record(record)
        while not (done := self._library.heap_offer(self._at, record)):
            self._records = longer(self._records, len(self._records) + 1)
            self._heap.records, self._heap.room = address_of(self._records), len(self._records)
        assert done > 0, "the record has no rank"

    def discard(self, record: Record) -> None:
        check_record(record)
        self._library.heap_discard(self._at, record)

    def first(self) -> Record:
        return int(self._records[0]) if self._heap.count else NO_RECORD

    def _widen(self, record: Record, primary: float) -> None:
        if record >= len(self._positions):
            self._positions = longer(self._positions, record + 1)
            self._secondaries = longer(self._secondaries, record + 1)
        num_records = len(self._positions)
        if primary and self._primaries is None:
            self._primaries = np.zeros(num_records, np.float64)
        if self._primaries is not None:
            if len(self._primaries) < num_records:
                self._primaries = longer(self._primaries, record + 1)
            self._heap.primaries = address_of(self._primaries)
        self._heap.positions = address_of(self._positions)
        self._heap.secondaries = address_of(self._secondaries)
        self._heap.num_records = num_records


def check_record(record: Record) -> None:
    """Raises ValueError for a number that no record has: C would take it modulo 2**32."""
    if not 0 <= record < MAX_RECORDS:
        raise ValueError(f"{record} is not a record")


def longer(column: npt.NDArray[Number], at_least: int) -> npt.NDArray[Number]:
    """A copy with zeros behind it; a quarter longer, so that growing costs O(1) per record in the long run."""
    grown = np.zeros(max(at_least, len(column) + len(column) // 4, _MIN_ROOM), column.dtype)
    grown[: len(column)] = column
    return grown
