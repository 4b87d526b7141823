"""Base class of eviction policies, and the heap of ranks that they use.

The catalog offers a block while it may be evicted (it has no hold, and no block that follows it is in its tier or a
faster one; see `kvstore.state.eviction.evictor`) and withdraws it otherwise. A policy therefore only orders the blocks
on offer. It knows blocks by their record (`kvstore.index_layout`), which is reused once the block was forgotten. It
knows neither sizes nor leases.
"""

import ctypes
import functools
from abc import ABC, abstractmethod
from array import array
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moonserve.kvstore.index_layout import MAX_RECORDS, NO_RECORD, Record, RecordArray
from moonserve.kvstore.published_index import bind_function, load_with_and_without_gil
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.process.native_libraries import c_fields
from moonserve.transfer.memory.data_plane import address_of

HEAP_SOURCE = Path(__file__).parents[2] / "native" / "rank_heap.c"
_MIN_ROOM = 64
_pointer, _double = ctypes.c_void_p, ctypes.c_double
_int64, _uint64 = ctypes.c_int64, ctypes.c_uint64
_int32, _uint32 = ctypes.c_int32, ctypes.c_uint32

Number = TypeVar("Number", bound=np.generic)


class HeapState(ctypes.Structure):
    """A heap and its columns (`Heap` of rank_heap.c)."""

    _fields_ = (
        *c_fields(_pointer, "records positions secondaries primaries"),
        *c_fields(_uint64, "count room num_records"),
    )
    count: int
    room: int
    num_records: int


class HeapLibrary:
    """The functions of rank_heap.c."""

    def __init__(self) -> None:
        long, short = load_with_and_without_gil(HEAP_SOURCE)
        self.heap_rank = bind_function(short, "heap_rank", _int32, _pointer, _uint32, _double, _uint64)
        self.heap_rank_all = bind_function(long, "heap_rank_all", None, _pointer, _pointer, _int64, _uint64)
        self.heap_offer = bind_function(short, "heap_offer", _int32, _pointer, _uint32)
        self.heap_discard = bind_function(short, "heap_discard", None, _pointer, _uint32)


heap_library = functools.cache(HeapLibrary)  # one per process


class RankHeap:
    """Binary heap of records by rank. The ranks are in columns indexed by record. Changes cost O(log n).

    A rank is (primary, secondary); the smallest is first. A record keeps its rank while it is not in the heap.
    Primaries take no memory while all of them are 0.
    """

    def __init__(self) -> None:
        """Creates an empty heap. Raises CompilerError."""
        self._library = heap_library()
        self._records = np.zeros(0, np.uint32)
        self._positions = np.zeros(0, np.uint32)
        self._secondaries = np.zeros(0, np.uint64)
        self._primaries: npt.NDArray[np.float64] | None = None  # allocated for the first that is not 0
        self._heap = HeapState()
        self._at = ctypes.addressof(self._heap)

    @property
    def nbytes(self) -> int:
        primaries = 0 if self._primaries is None else self._primaries.nbytes
        return self._records.nbytes + self._positions.nbytes + self._secondaries.nbytes + primaries

    def __len__(self) -> int:
        return int(self._heap.count)

    def rank(self, record: Record, primary: float, secondary: int) -> None:
        """Sets the rank of a record, whether it is in the heap or not."""
        check_record(record)
        while not self._library.heap_rank(self._at, record, primary, secondary):
            self._widen(record, primary)

    def rank_all(self, records: RecordArray, secondary: int) -> None:
        """Sets the ranks of many records, in order: primary 0, secondaries counted up from `secondary`. A record may
        occur twice. Runs without the GIL."""
        if not len(records):
            return
        check_record(int(records.min()))
        check_record(highest := int(records.max()))
        if highest >= self._heap.num_records:
            self._widen(highest, 0.0)
        records = np.ascontiguousarray(records)
        self._library.heap_rank_all(self._at, address_of(records), len(records), secondary)

    def rank_of(self, record: Record) -> tuple[float, int]:
        """Returns the rank of a record that was ranked before."""
        primary = 0.0 if self._primaries is None else float(self._primaries[record])
        return primary, int(self._secondaries[record])

    def offer(self, record: Record) -> None:
        """Adds a ranked record to the heap; no-op if it is there."""
        check_record(record)
        while not (done := self._library.heap_offer(self._at, record)):
            self._records = grown_column(self._records, len(self._records) + 1)
            self._heap.records, self._heap.room = address_of(self._records), len(self._records)
        assert done > 0, "the record has no rank"

    def discard(self, record: Record) -> None:
        """Removes a record from the heap; no-op if it is absent."""
        check_record(record)
        self._library.heap_discard(self._at, record)

    def first(self) -> Record:
        """Returns the record with the smallest rank; NO_RECORD if the heap is empty."""
        return int(self._records[0]) if self._heap.count else NO_RECORD

    def _widen(self, record: Record, primary: float) -> None:
        if record >= len(self._positions):
            self._positions = grown_column(self._positions, record + 1)
            self._secondaries = grown_column(self._secondaries, record + 1)
        num_records = len(self._positions)
        if primary and self._primaries is None:
            self._primaries = np.zeros(num_records, np.float64)
        if self._primaries is not None:
            if len(self._primaries) < num_records:
                self._primaries = grown_column(self._primaries, record + 1)
            self._heap.primaries = address_of(self._primaries)
        self._heap.positions = address_of(self._positions)
        self._heap.secondaries = address_of(self._secondaries)
        self._heap.num_records = num_records


def check_record(record: Record) -> None:
    """Raises ValueError for a number out of range, which C would take modulo 2**32."""
    if not 0 <= record < MAX_RECORDS:
        raise ValueError(f"{record} is not a record")


def grown_column(column: npt.NDArray[Number], at_least: int) -> npt.NDArray[Number]:
    """Returns a longer copy, padded with zeros. It grows by at least a quarter, so that growth is amortized O(1)."""
    grown = np.zeros(max(at_least, len(column) + len(column) // 4, _MIN_ROOM), column.dtype)
    grown[: len(column)] = column
    return grown


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
    with `_set_rank`, when it is stored or used. Every call costs O(log n) amortized, n = resident blocks.
    """

    def __init__(self) -> None:
        self._clock = 0  # counts uses; part of most ranks, to make them unique
        self._ranks = RankHeap()  # ranks of all resident records; the heap has those on offer
        self._last_victim = NO_RECORD  # until it is forgotten, by policies that learn from it

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
        self._last_victim = self._ranks.first()
        return self._last_victim

    @property
    def nbytes(self) -> int:
        """Memory in use by the policy, to a few percent."""
        return self._ranks.nbytes

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _set_rank(self, record: Record, primary: float, secondary: int) -> None:
        self._ranks.rank(record, primary, secondary)
