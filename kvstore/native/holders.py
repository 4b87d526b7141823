"""Reading who holds some rows of a table, and how far each holder's run goes: compiled or in numpy.

Columns have a word of 64 holders per row, and belong to whoever calls; only their addresses are remembered.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.native.prototypes import FLAGS
from protocol.native import CompilerError, load_library, shared_cache
from transfer.native.base import address_of

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("holders.c")
WORD_BITS = 64

Words: TypeAlias = npt.NDArray[np.uint64]
Rows: TypeAlias = npt.NDArray[np.int64]


class HolderKernel(Protocol):
    def leading(self, columns: Sequence[Words], live: Words, rows: Rows) -> tuple[Words, Rows]:
        """The live holders of each row [words, rows], and of each holder in how many leading rows it is [words · 64].

        `live`: a word per column; `rows`: as an index of this table gave them, so that every column has them."""


class PythonHolders:
    """`HolderKernel` in numpy."""

    def leading(self, columns: Sequence[Words], live: Words, rows: Rows) -> tuple[Words, Rows]:
        held = np.empty((len(columns), len(rows)), np.uint64)
        for own, column, word in zip(held, columns, live, strict=True):
            np.bitwise_and(column.take(rows), word, out=own)
        return held, run_lengths(held)


class NativeHolders:
    """`HolderKernel` over holders.c. Raises CompilerError where it cannot be had."""

    def __init__(self, folder: Path | None) -> None:
        loaded = load_library(SOURCE, FLAGS, folder)
        library = ctypes.PyDLL(loaded._name, handle=loaded._handle)  # short calls keep the GIL
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._leading = library.holders_leading
        self._leading.argtypes = pointer, pointer, number, pointer, number, pointer, pointer
        self._leading.restype = None
        self._columns: tuple[Words, ...] = ()  # the last ones given, whose addresses are known
        self._places = np.zeros(0, np.uint64)

    def leading(self, columns: Sequence[Words], live: Words, rows: Rows) -> tuple[Words, Rows]:
        num_words, num_rows = len(columns), len(rows)
        assert len(live) == num_words, "a word of who is live per column"
        held = np.empty((num_words, num_rows), np.uint64)
        runs = np.empty(num_words * WORD_BITS, np.int64)
        self._know(columns)
        self._leading(
            *(address_of(self._places), address_of(live), num_words, address_of(rows), num_rows),
            *(address_of(held), address_of(runs)),
        )
        return held, runs

    def _know(self, columns: Sequence[Words]) -> None:
        same = len(columns) == len(self._columns)
        if not (same and all(map(operator.is_, columns, self._columns))):
            self._columns = tuple(columns)
            self._places = np.array([address_of(column) for column in columns], np.uint64)


def run_lengths(held: Words) -> Rows:
    """Of each holder, in how many leading rows of `held` [words, rows] it is."""
    num_words, num_rows = held.shape
    if not num_rows:
        return np.zeros(num_words * WORD_BITS, np.int64)
    common = np.bitwise_and.accumulate(held, axis=1)
    # Few different runs among many rows: bits are spread out only where one ends.
    changed = common[:, 1:] != common[:, :-1]
    ends = np.logical_or.reduce(changed, axis=0).nonzero()[0]
    lasts = np.empty(len(ends) + 1, np.int64)
    lasts[:-1], lasts[-1] = ends, num_rows - 1
    lengths = lasts + 1
    lengths[1:] -= lasts[:-1] + 1
    words = np.ascontiguousarray(common.T[lasts])
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    runs: Rows = np.matmul(lengths, bits, dtype=np.int64)
    return runs


@functools.cache
def holder_kernel() -> HolderKernel:
    """The one of this process: code, like an imported module, so it is loaded once. As `library.compiled`, whose
    folder it shares."""
    try:
        return NativeHolders(shared_cache())
    except CompilerError as error:
        log.warning("compiled reading of holders is not available, using numpy: %s", error)
        return PythonHolders()
