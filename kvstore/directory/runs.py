"""How far from the first block on each holder's run of a chain's blocks goes. Pure functions of rows of bits.

A row is one block of the chain, its set bits are who holds it, 64 to a column (`kvstore.directory.table`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.directory.table import Bits, Slots
from kvstore.native.holders import WORD_BITS

_WORD_SHIFT = 6
_BIT_MASK = WORD_BITS - 1
_ONE = np.uint64(1)
# Blocks; below it a loop beats numpy's calls (1.4 against 15 µs for 2, 7 against 12 for 64).
_SHORT = 96


class Leading(NamedTuple):
    """The leading blocks of a chain that the index has rows for, and who holds them."""

    slots: Slots  # [blocks]
    held: Bits  # [words, blocks]: the live holders of each
    runs: npt.NDArray[np.int64]  # [bits]: leading blocks that each holder has without a gap

    def hold(
        self, bits: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
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


def runs_by_bit(rows: Sequence[Bits]) -> dict[int, int]:
    """By bit, in how many leading rows it is set; those that are not in the first are left out."""
    runs: dict[int, int] = {}
    for word, column in enumerate(rows):
        for length, bits in _endings(column):
            runs.update((word * WORD_BITS + bit, length) for bit in bits_of(bits))
    return runs


def _endings(column: Bits) -> Iterator[tuple[int, int]]:
    """(number of leading rows, the bits that are set in exactly so many of them), shortest first, without 0."""
    if not len(column):
        return
    if len(column) < _SHORT:
        yield from _endings_by_loop(column.tolist())
        return
    common = np.bitwise_and.accumulate(column)
    ends = np.flatnonzero(common[1:] != common[:-1])
    matching = int(common[0])
    for end, left in zip((ends + 1).tolist(), common[ends + 1].tolist(), strict=True):
        yield end, matching & ~left
        matching = left
    yield len(column), matching


def _endings_by_loop(column: Sequence[int]) -> Iterator[tuple[int, int]]:
    matching = column[0]
    for index, bits in enumerate(column):
        if gone := matching & ~bits:
            yield index, gone
            matching &= bits
            if not matching:
                return
    yield len(column), matching


def bits_of(mask: int) -> Iterator[int]:
    """The numbers of the set bits of `mask`, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit
