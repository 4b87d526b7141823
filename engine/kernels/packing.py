"""Weights laid out for the native products (`engine/native/product.h`): panels of 32 outputs, word by word of input.

A word is one float32 or two bfloat16. Owns that layout and the memory that it lies in, in huge pages where the system
has them, since a step reads all of it once. Knows no model.

Panels of bfloat16 may be *compact*: three quarters of the bytes, without loss (`engine/native/compact.h`), on
processors that read such panels faster than plain ones. 4 bits name one of 16 exponents; the weights that have others
stand beside, eight bytes each.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch

from engine.kernels.library import CMatrix, Library

LANES = 16
PANEL = 2 * LANES
_WORD_BYTES = 4
_HUGE_PAGE = 2 << 20


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


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A weight in its layout, with its bias."""

    num_panels: int
    words: int  # of a row of the input
    panels: torch.Tensor | Compact  # [panels, words, 32] int32, or what says the same
    bias: torch.Tensor | None  # [panels · 32] float32

    def structure(self) -> CMatrix:
        """Valid as long as this matrix."""
        bias = None if self.bias is None else self.bias.data_ptr()
        own = self.panels
        if isinstance(own, torch.Tensor):
            return CMatrix(own.data_ptr(), bias, self.words, self.num_panels, None, None, None)
        tables = (own.exponents, own.seldom, own.starts)
        addresses = [table.data_ptr() for table in tables]
        return CMatrix(own.cells.data_ptr(), bias, self.words, self.num_panels, *addresses)


class Arena:
    """Memory for all matrices of a model, given out from front to back: what is read one after another lies so. What is
    not given out, since matrices turned out compact, costs addresses only."""

    def __init__(self, nbytes: int, compactor: Compactor | None = None) -> None:
        """`compactor`: of matrices of bfloat16; None = they lie as they are."""
        self._compactor = compactor
        # Mapped memory begins anywhere in a huge page.
        memory = mmap.mmap(-1, nbytes + 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE)
        with suppress(OSError, AttributeError):  # a kernel or a platform without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(memory, dtype=torch.int32)
        skipped = -flat.data_ptr() % _HUGE_PAGE // _WORD_BYTES
        self._rest = flat[skipped:]

    def take(self, *shape: int) -> torch.Tensor:
        """[shape] int32."""
        count = 1
        for size in shape:
            count *= size
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken.view(shape)

    def lay(self, panels: torch.Tensor) -> torch.Tensor | Compact:
        """Panels [panels, words, 32] int32, of any strides."""
        if self._compactor is not None:
            compact = self._compactor(panels.contiguous(), self.take)
            if compact is not None:
                return compact
        return self.take(*panels.shape).copy_(panels)


def packed_bytes(weights: Iterable[torch.Tensor]) -> int:
    """At most how much of an arena these take."""
    return sum((weight.shape[0] + 2 * PANEL) * weight.shape[1] * weight.element_size() for weight in weights)


def pack(weight: torch.Tensor, bias: torch.Tensor | None, arena: Arena) -> Matrix:
    """A projection [out, in]."""
    padded = _pad(weight, PANEL)
    panels = padded.view(len(padded) // PANEL, PANEL, weight.shape[1])  # none of no rows
    return _pack(panels, _bias(bias), arena)


def pack_gates(weight: torch.Tensor, bias: torch.Tensor | None, arena: Arena) -> Matrix:
    """Gates above ups [2 · inner, in]: a panel is 16 gates and then the ups that they multiply."""
    return _pack(_pair(weight), None if bias is None else _pair(bias.float()[:, None])[..., 0], arena)


def _pack(panels: torch.Tensor, bias: torch.Tensor | None, arena: Arena) -> Matrix:
    """panels [panels, 32, in], bias of any shape in their order."""
    words = panels.contiguous().view(torch.int32).transpose(1, 2)
    padded = None if bias is None else _pad(bias.reshape(-1, 1), PANEL).flatten()
    return Matrix(words.shape[0], words.shape[1], arena.lay(words), padded)


def _bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float()


def _pair(rows: torch.Tensor) -> torch.Tensor:
    """[2 · inner, in] → [panels, 32, in]."""
    gates, ups = (_pad(half, LANES).view(-1, LANES, rows.shape[1]) for half in rows.chunk(2))
    return torch.cat((gates, ups), dim=1)


def _pad(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -len(rows) % multiple
    return torch.nn.functional.pad(rows, (0, 0, 0, missing))
