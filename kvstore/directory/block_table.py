"""Table with one row per block, in columns: key, holders, parent, number of children; and its hash index by key.

A row's number is its *slot*; a `SlotIndex` finds it by key. Rules: a free slot is not in the index. A slot is freed
as soon as its block has neither holders nor children, so the slot of a parent never dangles. A row that only exists
because a child names it has no holder and no parent. Does not know instances: holders are bits, 64 per column.

Columns have spare capacity; the part that was never used costs no memory. Python checks the bounds of all memory whose
address is passed to C, and keeps it alive.
"""

import ctypes
import functools
import secrets
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from moonserve.kvstore.index_layout import NO_RECORD, check_keys
from moonserve.kvstore.published_index import load_with_and_without_gil
from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey, iter_keys
from moonserve.protocol.process.native_libraries import c_fields
from moonserve.transfer.memory.data_plane import address_of

SLOTS_SOURCE = Path(__file__).parents[1] / "native" / "block_table.c"
MAX_ROWS = 2**32 - 2
_FIRST_PLACES = 64
_MAX_LOAD = 0.75
_GROWTH = 1.5

Rows: TypeAlias = npt.NDArray[np.int64]
Column: TypeAlias = npt.NDArray[Any]
"""Contiguous column of keys, 16 bytes each."""
WORD_BITS = 64


@functools.cache
def slots_library() -> ctypes.PyDLL:
    """Returns the functions of block_table.c. They are short or rare, so they keep the GIL. Raises CompilerError."""
    _, library = load_with_and_without_gil(SLOTS_SOURCE)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.slots_find.argtypes = pointer, pointer, pointer, number, pointer, ctypes.c_int32
    library.slots_find.restype = number
    for change in (library.slots_insert, library.slots_remove):
        change.argtypes, change.restype = (pointer, pointer, pointer, number), None
    library.slots_move.argtypes, library.slots_move.restype = (pointer, pointer, pointer), None
    library.holders_leading.argtypes = pointer, number, pointer, number, pointer, pointer
    library.holders_leading.restype = None
    return library


class _IndexState(ctypes.Structure):
    """An index of row numbers (`Index` of block_table.c)."""

    _fields_ = (
        ("places", ctypes.c_void_p),
        *c_fields(ctypes.c_uint64, "num_places seed count"),
    )
    num_places: int
    count: int


class SlotIndex:
    """Maps keys to rows of a column of keys, which the caller owns and passes to every call.

    Raises CompilerError when created.
    """

    def __init__(self) -> None:
        self._library = slots_library()
        self._seed = secrets.randbits(64)
        self._column: Column = np.empty(0, np.uint8)  # the last column passed, whose address is cached
        self._keys_at = 0
        self._settle(*self._make(_FIRST_PLACES))

    def __len__(self) -> int:
        return self._state.count

    @property
    def nbytes(self) -> int:
        return self._places.nbytes

    def find_all(self, column: Column, packed_keys: bytes, *, leading: bool = False) -> Rows:
        """Returns the row of each key, NO_RECORD for absent ones. With `leading`, stops before the first absent one."""
        count = check_keys(packed_keys)
        rows = np.empty(count, np.int64)
        found = self._library.slots_find(self._at, self._address(column), packed_keys, count, address_of(rows), leading)
        return rows if found == count else rows[:found].copy()

    def insert(self, column: Column, rows: Rows) -> None:
        """Inserts rows that were written to the column. Their keys must be absent and distinct."""
        _check_rows(column, rows)
        wanted = len(self) + len(rows)
        if wanted > self._state.num_places * _MAX_LOAD:
            places = max(int(self._state.num_places * _GROWTH), int(wanted / _MAX_LOAD) + 1)
            grown, state = self._make(places)
            self._library.slots_move(ctypes.addressof(state), self._at, self._address(column))
            self._settle(grown, state)
        self._library.slots_insert(self._at, self._address(column), address_of(rows), len(rows))

    def remove(self, column: Column, rows: Rows) -> None:
        """Removes rows, which must be present, and whose keys are still in the column."""
        _check_rows(column, rows)
        self._library.slots_remove(self._at, self._address(column), address_of(rows), len(rows))

    def _address(self, column: Column) -> int:
        if column is not self._column:
            self._column, self._keys_at = column, address_of(column)
        return self._keys_at

    def _make(self, num_places: int) -> tuple[npt.NDArray[np.uint32], _IndexState]:
        places = np.zeros(num_places, np.uint32)
        return places, _IndexState(address_of(places), num_places, self._seed, 0)

    def _settle(self, places: npt.NDArray[np.uint32], state: _IndexState) -> None:
        self._places, self._state = places, state
        self._at = ctypes.addressof(state)


def _check_rows(column: Column, rows: Rows) -> None:
    """Raises ValueError unless these are contiguous 64-bit numbers of rows in the column."""
    if not (rows.dtype == np.int64 and rows.flags.c_contiguous):
        raise ValueError("rows must be contiguous 64-bit numbers")
    if rows.size and not 0 <= rows.min() <= rows.max() < min(len(column), MAX_ROWS):
        raise ValueError("the column does not have this row")


Slots: TypeAlias = npt.NDArray[np.int64]
Bits: TypeAlias = npt.NDArray[np.uint64]

NO_SLOT = 2**32 - 1
_FREE = 2**32 - 2  # in the parents' column: the slot is free
_FIRST_CAPACITY = 64
_KEY = np.dtype((np.void, KEY_BYTES))


class BlockTable:
    """The rows of all blocks that are held or are parents of held blocks."""

    def __init__(self) -> None:
        self._index = SlotIndex()
        self._free = array("I")
        self._end = 0  # slots from here on were never used
        self.keys: npt.NDArray[Any] = np.empty(_FIRST_CAPACITY, _KEY)
        self.parents: npt.NDArray[np.uint32] = np.empty(_FIRST_CAPACITY, np.uint32)
        self.children: npt.NDArray[np.uint32] = np.empty(_FIRST_CAPACITY, np.uint32)
        self._set_holders([np.zeros(_FIRST_CAPACITY, np.uint64)])

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Memory in use by all columns and the index."""
        columns = [self.keys, self.parents, self.children, *self.holders]
        per_row = sum(column.itemsize for column in columns)
        return self._index.nbytes + self._end * per_row + len(self._free) * self._free.itemsize

    def find(self, key: BlockKey) -> int:
        """Returns the slot of `key`; NO_RECORD if it has no row."""
        return int(self._index.find_all(self.keys, key)[0])

    def find_all(self, packed_keys: bytes) -> Slots:
        """Returns the slot of each key, NO_RECORD for keys without a row."""
        return self._index.find_all(self.keys, packed_keys)

    def leading(self, packed_keys: bytes) -> "LeadingHolders":
        """Returns the holders of the leading keys, up to the first key without a row."""
        slots = self._index.find_all(self.keys, packed_keys, leading=True)
        return LeadingHolders(slots, *leading_holders(self._addresses, slots))

    def key(self, slot: int) -> BlockKey:
        return BlockKey(self.keys[slot].tobytes())

    def keys_of(self, slots: Slots) -> bytes:
        """Returns the packed keys of these rows."""
        return self.keys[slots].tobytes()

    def in_use(self) -> Slots:
        """Returns the slots of all rows in use."""
        return np.flatnonzero(self.parents[: self._end] != _FREE)

    def find_or_insert(self, packed_keys: bytes) -> Slots:
        """Returns the slot of each key, adding rows for new keys."""
        slots = self.find_all(packed_keys)
        absent = np.flatnonzero(slots == NO_RECORD)
        if absent.size:
            missing = np.frombuffer(packed_keys, _KEY)[absent].tobytes()
            self._make(b"".join(dict.fromkeys(iter_keys(missing))))
            slots[absent] = self.find_all(missing)
        return slots

    def set_parents(self, slots: Slots, packed_parents: bytes) -> None:
        """Sets the parents of rows; zeros are ignored. A known parent is never changed: a key commits to it."""
        named = np.frombuffer(packed_parents, np.uint64).reshape(-1, 2).any(axis=1)
        new = np.flatnonzero(named & (self.parents[slots] == NO_SLOT))
        if not new.size:
            return
        rows, first = np.unique(slots[new], return_index=True)  # a message may name a key twice
        parents = self.find_or_insert(np.frombuffer(packed_parents, _KEY)[new[first]].tobytes())
        self.parents[rows] = parents
        np.add.at(self.children, parents, 1)

    def free_rows(self, slots: Slots) -> None:
        """Frees rows without holders (each named once) and parents that only they kept. Rows with children stay."""
        parents = self.parents[slots]
        parents = parents[parents != NO_SLOT]
        self.parents[slots] = NO_SLOT
        np.subtract.at(self.children, parents, 1)
        candidates = np.unique(np.concatenate([slots, parents]))
        unused = (self.children[candidates] == 0) & ~self.is_held(candidates)
        self._release(candidates[unused])

    def is_held(self, slots: Slots) -> npt.NDArray[np.bool_]:
        held = np.zeros(len(slots), np.bool_)
        for column in self.holders:
            held |= column[slots] != 0
        return held

    def with_holder(self, word: int, mask: np.uint64) -> Slots:
        """Returns the slots of the rows that one holder has."""
        return np.flatnonzero(self.holders[word][: self._end] & mask)

    def add_holder_column(self) -> None:
        """Adds a column for 64 more holders."""
        self._set_holders([*self.holders, np.zeros(len(self.keys), np.uint64)])

    def validate(self) -> None:
        """Raises AssertionError if the columns contradict each other."""
        rows = self.in_use()
        assert len(rows) == len(self) == self._end - len(self._free), "a slot was lost"
        assert np.array_equal(self.find_all(self.keys_of(rows)), rows), "a row is misfiled"
        parents = self.parents[rows]
        named = parents[parents != NO_SLOT]
        assert np.all(self.parents[named] != _FREE), "a parent's slot was freed"
        counts = np.bincount(named, minlength=self._end)
        assert np.array_equal(counts[rows], self.children[rows]), "children were miscounted"
        held = self.is_held(rows)
        assert np.all(held | (self.children[rows] > 0)), "a row of nobody"
        assert np.all(held | (parents == NO_SLOT)), "a row that nobody holds has a parent"

    def _make(self, packed_keys: bytes) -> None:
        fresh = self._allocate(len(packed_keys) // KEY_BYTES)
        self.keys[fresh] = np.frombuffer(packed_keys, _KEY)
        self.parents[fresh] = NO_SLOT
        self.children[fresh] = 0
        for column in self.holders:
            column[fresh] = 0
        self._index.insert(self.keys, fresh)

    def _allocate(self, count: int) -> Slots:
        num_reused = min(count, len(self._free))
        kept = len(self._free) - num_reused
        reused = np.array(self._free[kept:], np.int64)
        del self._free[kept:]
        first, self._end = self._end, self._end + count - num_reused
        self._reserve(self._end)
        return np.concatenate([reused, np.arange(first, self._end)])

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= len(self.keys):
            return
        capacity = max(num_rows, len(self.keys) * 2)
        self.keys = _grown_column(self.keys, capacity)
        self.parents = _grown_column(self.parents, capacity)
        self.children = _grown_column(self.children, capacity)
        self._set_holders([_grown_column(column, capacity) for column in self.holders])

    def _set_holders(self, columns: list[Bits]) -> None:
        self.holders, self._addresses = columns, np.array(list(map(address_of, columns)), np.uint64)

    def _release(self, slots: Slots) -> None:
        self._index.remove(self.keys, slots)
        self.parents[slots] = _FREE
        self._free.extend(slots.tolist())


def _grown_column(column: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    """Returns a copy of length `capacity`; the new part takes no memory before it is written."""
    longer = np.empty(capacity, column.dtype)
    longer[: len(column)] = column
    return longer


_WORD_SHIFT = 6
_BIT_MASK = WORD_BITS - 1
_ONE = np.uint64(1)


class LeadingHolders(NamedTuple):
    """The leading blocks of a chain that have rows, and their holders."""

    slots: Slots  # [blocks]
    held: Bits  # [words, blocks]: the holders of each block, as bits
    runs: npt.NDArray[np.int64]  # [bits]: number of leading blocks that each holder has without a gap

    def hold(self, bits: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Returns, for each pair of `bits` and `blocks`, if the holder has the block."""
        return _among(self.held[bits >> _WORD_SHIFT, blocks], bits)

    def holders(self, bits: npt.NDArray[np.int64], block: int) -> npt.NDArray[np.bool_]:
        """Returns a mask of the holders that have one block."""
        return _among(self.held[:, block].take(bits >> _WORD_SHIFT), bits)

    def has(self, bit: int, block: int) -> bool:
        """Returns True if one holder has one block."""
        return bool(int(self.held[bit >> _WORD_SHIFT, block]) >> (bit & _BIT_MASK) & 1)

    def end_of_run(self, bit: int, first: int) -> int:
        """Returns the end of the run of blocks that a holder has without a gap from `first` on."""
        leading = int(self.runs[bit])
        if leading > first:
            return leading
        words = self.held[bit >> _WORD_SHIFT, first:]
        gaps = words >> np.uint64(bit & _BIT_MASK) & _ONE == 0
        return first + int(gaps.argmax()) if gaps.any() else first + len(gaps)


def leading_holders(addresses: Bits, rows: Slots) -> tuple[Bits, Slots]:
    """Returns the holders of each row [words, rows], and the number of leading rows of each holder [words · 64].

    `addresses` are those of the columns of holders. `rows` must come from an index of their table, so that every column
    has them.
    """
    held = np.empty((len(addresses), len(rows)), np.uint64)
    runs = np.empty(len(addresses) * WORD_BITS, np.int64)
    columns, of_rows = (address_of(addresses), len(addresses)), (address_of(rows), len(rows))
    slots_library().holders_leading(*columns, *of_rows, address_of(held), address_of(runs))
    return held, runs


def _among(words: Bits, bits: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Returns, for each word, if its bit is set."""
    held: npt.NDArray[np.bool_] = words >> (bits & _BIT_MASK).view(np.uint64) & _ONE != 0
    return held


def bits_of(mask: int) -> Iterator[int]:
    """Yields the numbers of the set bits of `mask`, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit
