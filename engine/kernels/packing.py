"""Weights laid out for the native products (`engine/native/product.h`): panels of 32 outputs, word by word of input.

A word is one float32 or two bfloat16. Owns that layout and the memory that it lies in, in huge pages where the system
has them, since a step reads all of it once. Does not know models.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import torch

LANES = 16
PANEL = 2 * LANES
_WORD_BYTES = 4
_HUGE_PAGE = 2 << 20


class CMatrix(ctypes.Structure):
    """`Matrix` of product.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("words", ctypes.c_int64),
        ("num_panels", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A weight in its layout, with its bias."""

    panels: torch.Tensor  # [panels, words, 32] int32
    bias: torch.Tensor | None  # [panels · 32] float32

    def structure(self) -> CMatrix:
        """Valid as long as this matrix."""
        num_panels, words, _ = self.panels.shape
        bias = None if self.bias is None else self.bias.data_ptr()
        return CMatrix(self.panels.data_ptr(), bias, words, num_panels)


class Arena:
    """Memory for all matrices of a model, given out from front to back: what is read one after another lies so."""

    def __init__(self, nbytes: int) -> None:
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


def packed_bytes(weights: Iterable[torch.Tensor]) -> int:
    """At most how much of an arena these take."""
    return sum(
        (weight.shape[0] + 2 * PANEL) * weight.shape[1] * weight.element_size()
        for weight in weights
    )


def pack(weight: torch.Tensor, bias: torch.Tensor | None, arena: Arena) -> Matrix:
    """A projection [out, in]."""
    padded = _pad(weight, PANEL)
    panels = padded.view(len(padded) // PANEL, PANEL, weight.shape[1])  # none of no rows
    return _pack(panels, _bias(bias), arena)


def pack_gates(weight: torch.Tensor, bias: torch.Tensor | None, arena: Arena) -> Matrix:
    """Gates above ups [2 · inner, in]: a panel is 16 gates and then the ups that they multiply."""
    return _pack(
        _pair(weight), None if bias is None else _pair(bias.float()[:, None])[..., 0], arena
    )


def _pack(panels: torch.Tensor, bias: torch.Tensor | None, arena: Arena) -> Matrix:
    """panels [panels, 32, in], bias of any shape in their order."""
    words = panels.contiguous().view(torch.int32)
    taken = arena.take(words.shape[0], words.shape[2], PANEL)
    taken.copy_(words.transpose(1, 2))
    return Matrix(taken, None if bias is None else _pad(bias.reshape(-1, 1), PANEL).flatten())


def _bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float()


def _pair(rows: torch.Tensor) -> torch.Tensor:
    """[2 · inner, in] → [panels, 32, in]."""
    gates, ups = (_pad(half, LANES).view(-1, LANES, rows.shape[1]) for half in rows.chunk(2))
    return torch.cat((gates, ups), dim=1)


def _pad(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -len(rows) % multiple
    return torch.nn.functional.pad(rows, (0, 0, 0, missing))
