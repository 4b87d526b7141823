"""One row per block, in columns: its key, who holds it, its parent, how many rows name it so.

A row's number is its *slot*, found by key through a `SlotIndex`. Rules: a slot that is not in use is not in that index;
a slot is freed as soon as nobody holds its block and no row names it as parent, so a parent's number never dangles. A
row that is only there because a child names it is held by nobody and has no parent itself. Does not know instances:
who holds a block is bits, 64 to a column.

Columns are as long as they may become before they move, but what was never used of them costs no memory.
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
_FREE = 2**32 - 2  # in the parents' column: the slot is not in use
_FIRST_CAPACITY = 64
_KEY = np.dtype((np.void, KEY_BYTES))


class Table:
    """The rows of all blocks that somebody holds, or that are parents of such."""

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
        """Memory in use, by all columns and the index."""
        columns = [self.keys, self.parents, self.children, *self.holders]
        per_row = sum(column.itemsize for column in columns)
        return self._index.nbytes + self._end * per_row + len(self._free) * self._free.itemsize

    def find(self, key: BlockKey) -> int:
        """NO_RECORD when it has no row."""
        return int(self._index.find_all(self.keys, key)[0])

    def find_all(self, packed_keys: bytes) -> Slots:
        """NO_RECORD where there is no row."""
        return self._index.find_all(self.keys, packed_keys)

    def find_leading(self, packed_keys: bytes) -> Slots:
        """Up to the first key without a row."""
        return self._index.find_leading(self.keys, packed_keys)

    def key(self, slot: int) -> BlockKey:
        return BlockKey(self.keys[slot].tobytes())

    def keys_of(self, slots: Slots) -> bytes:
        """Back to back."""
        return self.keys[slots].tobytes()

    def in_use(self) -> Slots:
        """All rows, in no order that means anything."""
        return np.flatnonzero(self.parents[: self._end] != _FREE)

    def enter(self, packed_keys: bytes) -> Slots:
        """The row of each key, made where there was none."""
        slots = self.find_all(packed_keys)
        absent = np.flatnonzero(slots == NO_RECORD)
        if absent.size:
            missing = np.frombuffer(packed_keys, _KEY)[absent].tobytes()
            self._make(b"".join(dict.fromkeys(iter_keys(missing))))
            slots[absent] = self.find_all(missing)
        return slots

    def link(self, slots: Slots, packed_parents: bytes) -> None:
        """Says whose children the rows are; zeros say nothing. A parent once known stays: a key commits to it."""
        named = np.frombuffer(packed_parents, np.uint64).reshape(-1, 2).any(axis=1)
        new = np.flatnonzero(named & (self.parents[slots] == NO_SLOT))
        if not new.size:
            return
        rows, first = np.unique(slots[new], return_index=True)  # a message may name a key twice
        parents = self.enter(np.frombuffer(packed_parents, _KEY)[new[first]].tobytes())
        self.parents[rows] = parents
        np.add.at(self.children, parents, 1)

    def let_go(self, slots: Slots) -> None:
        """Nobody holds these rows (each named once) any more: frees them, and parents that only they kept."""
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
        """Takes all holders away."""
        for column in self.holders:
            column[slots] = 0

    def with_holder(self, word: int, mask: np.uint64) -> Slots:
        """The rows that one holder has."""
        return np.flatnonzero(self.holders[word][: self._end] & mask)

    def widen(self) -> None:
        """Room for 64 more holders."""
        self.holders.append(np.zeros(len(self.keys), np.uint64))

    def validate(self) -> None:
        """Raises AssertionError when the columns contradict each other."""
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
    """A copy with room behind it that takes no memory before it is written."""
    longer = np.empty(capacity, column.dtype)
    longer[: len(column)] = column
    return longer


_WORD_SHIFT = 6
_BIT_MASK = WORD_BITS - 1
_ONE = np.uint64(1)


class Leading(NamedTuple):
    """The leading blocks of a chain that the index has rows for, and who holds them."""

    slots: Slots  # [blocks]
    held: Bits  # [words, blocks]: the live holders of each
    runs: npt.NDArray[np.int64]  # [bits]: leading blocks that each holder has without a gap

    def hold(self, bits: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of some holders have the block that is given for each."""
        return _among(self.held[bits >> _WORD_SHIFT, blocks], bits)

    def holders(self, bits: npt.NDArray[np.int64], block: int) -> npt.NDArray[np.bool_]:
        """Which of some holders have one block."""
        return _among(self.held[:, block].take(bits >> _WORD_SHIFT), bits)

    def has(self, bit: int, block: int) -> bool:
        """Whether one holder has one block."""
        return bool(int(self.held[bit >> _WORD_SHIFT, block]) >> (bit & _BIT_MASK) & 1)

    def end_of_run(self, bit: int, first: int) -> int:
        """Up to where a holder has all blocks from `first` on."""
        leading = int(self.runs[bit])
        if leading > first:
            return leading
        words = self.held[bit >> _WORD_SHIFT, first:]
        gaps = words >> np.uint64(bit & _BIT_MASK) & _ONE == 0
        return first + int(gaps.argmax()) if gaps.any() else first + len(gaps)


def _among(words: Bits, bits: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Of each word, whether its bit is set."""
    held: npt.NDArray[np.bool_] = words >> (bits & _BIT_MASK).view(np.uint64) & _ONE != 0
    return held


def bits_of(mask: int) -> Iterator[int]:
    """The numbers of the set bits of `mask`, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit
