"""Panels of bfloat16 weights in three quarters of their bytes, without loss (`engine/native/compact.h`).

Decides which 16 exponents of a matrix 4 bits name, and whether that pays: the other weights stand beside, eight bytes
each. Owns nothing; the library does the work, on processors that read such panels faster than plain ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.kernels.library import Library

_CELL_WORDS = 48  # CELL_BYTES of compact.h
_NUM_EXPONENTS = 256
_NAMED = 16
_MANTISSA_BITS = 7
_MOST_SELDOM = 1 / 512
"""Of all weights. Putting one back costs about as much as reading a cell of 128, so that reading takes a quarter longer
at that. A normal distribution leaves less than one in 10,000 out."""

Take = Callable[[int, int, int], torch.Tensor]
"""Memory for so large a tensor of int32."""


@dataclass(frozen=True, slots=True, eq=False)
class Compact:
    """Panels as cells, and what it takes to read them."""

    cells: torch.Tensor  # [panels, words / 2, 48] int32
    exponents: torch.Tensor  # [32] int16: 16 of them, twice
    seldom: torch.Tensor  # [n] int64: weights whose exponent is not among them, with their places
    starts: torch.Tensor  # [panels + 1] int64: each panel's first one of those


class Compactor:
    """Of matrices for one library, which must read such panels."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def __call__(self, panels: torch.Tensor, take: Take) -> Compact | None:
        """Contiguous panels [panels, words, 32] int32 in memory from `take`. None: they stay as they are better."""
        num_panels, words, _ = panels.shape
        if words % 2 or not num_panels:
            return None
        counts = self._counts(panels)
        named = counts.argsort(descending=True, stable=True)[:_NAMED]
        num_seldom = int(counts.sum() - counts[named].sum())
        if num_seldom > _MOST_SELDOM * 2 * panels.numel():
            return None
        codes = torch.full((_NUM_EXPONENTS,), -1, dtype=torch.int8)
        codes[named] = torch.arange(_NAMED, dtype=torch.int8)
        found = Compact(
            take(num_panels, words // 2, _CELL_WORDS),
            (named << _MANTISSA_BITS).to(torch.int16).repeat(2),
            torch.empty(num_seldom, dtype=torch.int64),
            torch.empty(num_panels + 1, dtype=torch.int64),
        )
        self._library.make_compact(
            panels.data_ptr(),
            num_panels,
            words,
            codes.data_ptr(),
            found.cells.data_ptr(),
            found.seldom.data_ptr(),
            found.starts.data_ptr(),
        )
        return found

    def _counts(self, panels: torch.Tensor) -> torch.Tensor:
        """How many weights have each exponent."""
        counts = torch.zeros(_NUM_EXPONENTS, dtype=torch.int64)
        self._library.count_exponents(panels.data_ptr(), 2 * panels.numel(), counts.data_ptr())
        return counts
