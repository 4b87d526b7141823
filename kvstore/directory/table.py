"""Table with one row per block, in columns: key, holders, parent, number of children.

A row's number is its *slot*; a `SlotIndex` finds it by key. Rules: a free slot is not in the index. A slot is freed as
soon as its block has neither holders nor children, so the slot of a parent never dangles. A row that only exists
because a child names it has no holder and no parent. Does not know instances: holders are bits, 64 per column.

Columns have spare capacity; the part that was never used costs no memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.native.base import NO_RECORD
from kvstore.native.slot_index import WORD_BITS, SlotIndex
from protocol.keys import KEY_BYTES, BlockKey, iter_keys

Slots: TypeAlias = npt.NDArray[np.int64]
Bits: TypeAlias = npt.NDArray[np.uint64]

NO_SLOT = 2**32 - 1
_FREE = 2**32 - 2  # in the parents' column: the slot is free
_FIRST_CAPACITY = 64
_KEY = np.dtype((np.void, KEY_BYTES))


class Table:
    """The rows of all blocks that are held or are parents of held blocks."""

    def __init__(self) -> None:
        self._index = SlotIndex()
        self._free = array("I")
        self._end = 0  # slots from here on were never used
        self.keys: npt.NDArray[Any] = np.empty(_FIRST_CAPACITY, _KEY)
        self.parents: npt.NDArray[np.uint32] = np.empty(_FIRST_CAPACITY, np.uint32)
        self.children: npt.NDArray[np.uint32] = np.empty(_FIRST_CAPACITY, np.uint32)
        self.holders: list[Bits] = [np.zeros(_FIRST_CAPACITY, np.uint64)]

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

    def find_leading(self, packed_keys: bytes) -> Slots:
        """Returns the slots of the leading keys, up to the first key without a row."""
        return self._index.find_leading(self.keys, packed_keys)

    def key(self, slot: int) -> BlockKey:
        return BlockKey(self.keys[slot].tobytes())

    def keys_of(self, slots: Slots) -> bytes:
        """Returns the packed keys of these rows."""
        return self.keys[slots].tobytes()

    def in_use(self) -> Slots:
        """Returns the slots of all rows in use."""
        return np.flatnonzero(self.parents[: self._end] != _FREE)

    def enter(self, packed_keys: bytes) -> Slots:
        """Returns the slot of each key, adding rows for new keys."""
        slots = self.find_all(packed_keys)
        absent = np.flatnonzero(slots == NO_RECORD)
        if absent.size:
            missing = np.frombuffer(packed_keys, _KEY)[absent].tobytes()
            self._make(b"".join(dict.fromkeys(iter_keys(missing))))
            slots[absent] = self.find_all(missing)
        return slots

    def link(self, slots: Slots, packed_parents: bytes) -> None:
        """Sets the parents of rows; zeros are ignored. A known parent is never changed: a key commits to it."""
        named = np.frombuffer(packed_parents, np.uint64).reshape(-1, 2).any(axis=1)
        new = np.flatnonzero(named & (self.parents[slots] == NO_SLOT))
        if not new.size:
            return
        rows, first = np.unique(slots[new], return_index=True)  # a message may name a key twice
        parents = self.enter(np.frombuffer(packed_parents, _KEY)[new[first]].tobytes())
        self.parents[rows] = parents
        np.add.at(self.children, parents, 1)

    def let_go(self, slots: Slots) -> None:
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

    def clear(self, slots: Slots) -> None:
        """Removes all holders of these rows."""
        for column in self.holders:
            column[slots] = 0

    def with_holder(self, word: int, mask: np.uint64) -> Slots:
        """Returns the slots of the rows that one holder has."""
        return np.flatnonzero(self.holders[word][: self._end] & mask)

    def widen(self) -> None:
        """Adds a column for 64 more holders."""
        self.holders.append(np.zeros(len(self.keys), np.uint64))

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
        self.clear(fresh)
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
        self.keys = _longer(self.keys, capacity)
        self.parents = _longer(self.parents, capacity)
        self.children = _longer(self.children, capacity)
        self.holders = [_longer(column, capacity) for column in self.holders]

    def _release(self, slots: Slots) -> None:
        self._index.remove(self.keys, slots)
        self.parents[slots] = _FREE
        self._free.extend(slots.tolist())


def _longer(column: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    """Returns a copy of length `capacity`; the new part takes no memory before it is written."""
    longer = np.empty(capacity, column.dtype)
    longer[: len(column)] = column
    return longer


_WORD_SHIFT = 6
_BIT_MASK = WORD_BITS - 1
_ONE = np.uint64(1)


class Leading(NamedTuple):
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
