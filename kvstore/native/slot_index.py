"""Hash index of row numbers over a column of keys, and a kernel that reads the holders of rows.

The caller owns the column of 16-byte keys and passes it to every call. Its rule, as in `metadata`: Python checks the
bounds of all memory whose address is passed to C, and keeps it alive.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from protocol.keys import KEY_BYTES
from protocol.native import C_FLAGS, load_library, shared_cache
from transfer.native import address_of

SLOTS_SOURCE = Path(__file__).with_name("slot_index.c")
MAX_ROWS = 2**32 - 2
_FIRST_PLACES = 64
_MOST_LOADED = 0.75
_GROWTH = 1.5

Rows: TypeAlias = npt.NDArray[np.int64]
Column: TypeAlias = npt.NDArray[Any]
"""Contiguous column of keys, 16 bytes each."""


def _loaded(source: Path) -> ctypes.PyDLL:
    """Loads a library whose calls are short or rare, so they keep the GIL. Raises CompilerError."""
    loaded = load_library(source, C_FLAGS, shared_cache())
    return ctypes.PyDLL(loaded._name, handle=loaded._handle)


@functools.cache
def _slots() -> ctypes.PyDLL:
    library = _loaded(SLOTS_SOURCE)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.slots_find.argtypes = pointer, pointer, pointer, number, pointer, ctypes.c_int32
    library.slots_find.restype = number
    for change in (library.slots_insert, library.slots_remove):
        change.argtypes, change.restype = (pointer, pointer, pointer, number), None
    library.slots_move.argtypes, library.slots_move.restype = (pointer, pointer, pointer), None
    return library


class _State(ctypes.Structure):
    """An index of row numbers (`Index` of slot_index.c)."""

    _fields_ = (
        ("places", ctypes.c_void_p),
        ("num_places", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
    )
    num_places: int
    count: int


class SlotIndex:
    """Maps keys to rows of a column. Raises CompilerError when created."""

    def __init__(self) -> None:
        self._library = _slots()
        self._seed = secrets.randbits(64)
        self._column: Column = np.empty(0, np.uint8)  # the last column passed, whose address is cached
        self._keys_at = 0
        self._settle(*self._make(_FIRST_PLACES))

    def __len__(self) -> int:
        return self._state.count

    @property
    def nbytes(self) -> int:
        return self._places.nbytes

    def find_all(self, column: Column, packed_keys: bytes) -> Rows:
        """Returns the row of each key, NO_RECORD for absent ones."""
        return self._find(column, packed_keys, leading=False)

    def find_leading(self, column: Column, packed_keys: bytes) -> Rows:
        """Returns the rows of the leading keys, up to and excluding the first absent one."""
        return self._find(column, packed_keys, leading=True)

    def insert(self, column: Column, rows: Rows) -> None:
        """Inserts rows that were written to the column. Their keys must be absent and distinct."""
        _check_rows(column, rows)
        wanted = len(self) + len(rows)
        if wanted > self._state.num_places * _MOST_LOADED:
            places = max(int(self._state.num_places * _GROWTH), int(wanted / _MOST_LOADED) + 1)
            grown, state = self._make(places)
            self._library.slots_move(ctypes.addressof(state), self._at, self._address(column))
            self._settle(grown, state)
        self._library.slots_insert(self._at, self._address(column), address_of(rows), len(rows))

    def remove(self, column: Column, rows: Rows) -> None:
        """Removes rows, which must be present, and whose keys are still in the column."""
        _check_rows(column, rows)
        self._library.slots_remove(self._at, self._address(column), address_of(rows), len(rows))

    def _find(self, column: Column, packed_keys: bytes, *, leading: bool) -> Rows:
        count = _num_keys(packed_keys)
        rows = np.empty(count, np.int64)
        found = self._library.slots_find(self._at, self._address(column), packed_keys, count, address_of(rows), leading)
        return rows if found == count else rows[:found].copy()

    def _address(self, column: Column) -> int:
        if column is not self._column:
            self._column, self._keys_at = column, address_of(column)
        return self._keys_at

    def _make(self, num_places: int) -> tuple[npt.NDArray[np.uint32], _State]:
        places = np.zeros(num_places, np.uint32)
        return places, _State(address_of(places), num_places, self._seed, 0)

    def _settle(self, places: npt.NDArray[np.uint32], state: _State) -> None:
        self._places, self._state = places, state
        self._at = ctypes.addressof(state)


def _num_keys(packed_keys: bytes) -> int:
    """Returns the number of packed keys. Raises ValueError if it is not a whole number."""
    count, rest = divmod(len(packed_keys), KEY_BYTES)
    if rest:
        raise ValueError(f"{len(packed_keys)} bytes are not a whole number of keys")
    return count


def _check_rows(column: Column, rows: Rows) -> None:
    """Raises ValueError unless these are contiguous 64-bit numbers of rows in the column."""
    if not (rows.dtype == np.int64 and rows.flags.c_contiguous):
        raise ValueError("rows must be contiguous 64-bit numbers")
    if rows.size and not 0 <= rows.min() <= rows.max() < min(len(column), MAX_ROWS):
        raise ValueError("a row that the column does not have")


HOLDERS_SOURCE = Path(__file__).with_name("holders.c")
WORD_BITS = 64

Words: TypeAlias = npt.NDArray[np.uint64]


@functools.cache
def _holders_leading() -> Any:
    leading = _loaded(HOLDERS_SOURCE).holders_leading
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    leading.argtypes = pointer, number, pointer, number, pointer, pointer
    leading.restype = None
    return leading


class HolderKernel:
    """Reads the holders of rows of a table, and the length of each holder's run. Raises CompilerError."""

    def __init__(self) -> None:
        self._leading = _holders_leading()
        self._columns: tuple[Words, ...] = ()  # the last columns passed, whose addresses are cached
        self._places = np.zeros(0, np.uint64)

    def leading(self, columns: Sequence[Words], rows: Rows) -> tuple[Words, Rows]:
        """Returns the holders of each row [words, rows], and the number of leading rows of each holder [words · 64].

        `rows` must come from an index of this table, so that every column has them.
        """
        num_words, num_rows = len(columns), len(rows)
        held = np.empty((num_words, num_rows), np.uint64)
        runs = np.empty(num_words * WORD_BITS, np.int64)
        self._know(columns)
        self._leading(
            *(address_of(self._places), num_words, address_of(rows), num_rows),
            *(address_of(held), address_of(runs)),
        )
        return held, runs

    def _know(self, columns: Sequence[Words]) -> None:
        same = len(columns) == len(self._columns)
        if not (same and all(map(operator.is_, columns, self._columns))):
            self._columns = tuple(columns)
            self._places = np.array([address_of(column) for column in columns], np.uint64)
