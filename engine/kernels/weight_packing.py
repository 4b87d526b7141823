"""Weight layout of the native products (`engine/kernels/native/products/matrix_product.h`): panels of 32 outputs, word
by word of input.

A word is one float32 or two bfloat16. Quantised matrices are in panels already
(`engine.model.weights.quantised_matrix`). Knows no model.

Panels of bfloat16 may be *compact*: lossless in three quarters of the bytes
(`engine/kernels/native/products/compact_weights.h`), on processors that read compact panels faster than plain ones. 4
bits select one of 16 exponents; weights with other exponents are stored separately, in eight bytes each.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from moonserve.engine.kernels.native_library import CMatrix, LayersLibrary
from moonserve.engine.model.weights.layer_weights import Projection
from moonserve.engine.model.weights.quantised_matrix import LANES, PANEL, HugePages, QuantisedMatrix

_WORD_BYTES = 4
_CELL_WORDS = 48  # CELL_BYTES of compact_weights.h
_NUM_EXPONENTS = 256
_NAMED = 16
_MANTISSA_BITS = 7
_MAX_OUTLIERS = 1 / 512
"""Largest share of weights stored separately. Inserting one costs about as much as reading a cell of 128 weights, so
at this share reading takes a quarter longer. With a normal distribution the share is below one in 10,000."""

Take = Callable[[int, int, int], torch.Tensor]
"""Allocates an int32 tensor of the given shape."""


@dataclass(frozen=True, slots=True, eq=False)
class Compact:
    """Compact panels: cells and the tables to decode them."""

    cells: torch.Tensor  # [panels, words / 2, 48] int32
    exponents: torch.Tensor  # [32] int16: the 16 exponents, twice
    outliers: torch.Tensor  # [n] int64: weights with other exponents, and their places
    starts: torch.Tensor  # [panels + 1] int64: index in `outliers` of each panel's first one


class Compactor:
    """Compacts matrices for one library, which must be able to read compact panels."""

    def __init__(self, library: LayersLibrary) -> None:
        self._library = library

    def __call__(self, panels: torch.Tensor, take: Take) -> Compact | None:
        """Compacts contiguous panels [panels, words, 32] int32 into memory from `take`. Returns None if they are better
        left plain."""
        num_panels, words, _ = panels.shape
        if words % 2 or not num_panels:
            return None
        counts = self._counts(panels)
        named = counts.argsort(descending=True, stable=True)[:_NAMED]
        num_outliers = int(counts.sum() - counts[named].sum())
        if num_outliers > _MAX_OUTLIERS * 2 * panels.numel():
            return None
        codes = torch.full((_NUM_EXPONENTS,), -1, dtype=torch.int8)
        codes[named] = torch.arange(_NAMED, dtype=torch.int8)
        found = Compact(
            take(num_panels, words // 2, _CELL_WORDS),
            (named << _MANTISSA_BITS).to(torch.int16).repeat(2),
            torch.empty(num_outliers, dtype=torch.int64),
            torch.empty(num_panels + 1, dtype=torch.int64),
        )
        self._library.make_compact(
            panels.data_ptr(),
            num_panels,
            words,
            codes.data_ptr(),
            found.cells.data_ptr(),
            found.outliers.data_ptr(),
            found.starts.data_ptr(),
        )
        return found

    def _counts(self, panels: torch.Tensor) -> torch.Tensor:
        """Returns the number of weights with each exponent."""
        counts = torch.zeros(_NUM_EXPONENTS, dtype=torch.int64)
        self._library.count_exponents(panels.data_ptr(), 2 * panels.numel(), counts.data_ptr())
        return counts


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A packed weight with its bias."""

    num_panels: int
    words: int  # of a row of the input
    panels: torch.Tensor | Compact | QuantisedMatrix  # [panels, words, 32] int32, or fewer bytes
    bias: torch.Tensor | None  # [panels · 32] float32

    def structure(self) -> CMatrix:
        """Returns the C++ structure, valid as long as this matrix."""
        bias = None if self.bias is None else self.bias.data_ptr()
        own = self.panels
        if isinstance(own, torch.Tensor):
            return CMatrix(own.data_ptr(), bias, self.words, self.num_panels)
        if isinstance(own, QuantisedMatrix):
            tables = (None if each is None else each.data_ptr() for each in (own.scales, own.zeros, own.mins))
            quantised = (*tables, own.format.bits, own.format.group, own.inputs, own.format.is_float)
            compact = (None, None, None)
            return CMatrix(own.codes.data_ptr(), bias, self.words, self.num_panels, *compact, *quantised)
        addresses = [table.data_ptr() for table in (own.exponents, own.outliers, own.starts)]
        return CMatrix(own.cells.data_ptr(), bias, self.words, self.num_panels, *addresses)


class Arena:
    """Memory for all plain matrices of a model. Some stays unused if matrices are compact."""

    def __init__(self, nbytes: int, compactor: Compactor | None = None) -> None:
        """`compactor`: for bfloat16 matrices; None = all panels stay plain."""
        self._compactor = compactor
        self._memory = HugePages(nbytes)

    def take(self, *shape: int) -> torch.Tensor:
        """Allocates an int32 tensor of this shape."""
        return self._memory.take(torch.int32, *shape)

    def store(self, panels: torch.Tensor) -> torch.Tensor | Compact:
        """Stores panels [panels, words, 32] int32, of any strides, in compact form if that is better."""
        if self._compactor is not None:
            compact = self._compactor(panels.contiguous(), self.take)
            if compact is not None:
                return compact
        return self.take(*panels.shape).copy_(panels)


def packed_bytes(weights: Iterable[Projection]) -> int:
    """Returns an upper bound of the arena bytes that these weights need, without those that are quantised."""
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    return sum((weight.shape[0] + 2 * PANEL) * weight.shape[1] * weight.element_size() for weight in plain)


def pack(weight: Projection, bias: torch.Tensor | None, arena: Arena) -> Matrix:
    """Packs a projection [out, in]."""
    if isinstance(weight, QuantisedMatrix):
        return Matrix(weight.num_panels, weight.words, weight, _padded(_bias(bias)))
    padded = _pad(weight, PANEL)
    panels = padded.view(len(padded) // PANEL, PANEL, weight.shape[1])  # no panels for no rows
    return _pack(panels, _bias(bias), arena)


def pack_gates(weight: Projection, bias: torch.Tensor | None, arena: Arena) -> Matrix:
    """Packs gates above ups [2 · inner, in]. A panel has 16 gates, then the 16 ups that they multiply."""
    paired = None if bias is None else _pair(bias.float()[:, None])[..., 0]
    if isinstance(weight, QuantisedMatrix):
        return Matrix(weight.num_panels, weight.words, weight, _padded(paired))
    return _pack(_pair(weight), paired, arena)


def _pack(panels: torch.Tensor, bias: torch.Tensor | None, arena: Arena) -> Matrix:
    """Packs panels [panels, 32, in], with a bias of any shape in the same order."""
    words = panels.contiguous().view(torch.int32).transpose(1, 2)
    return Matrix(words.shape[0], words.shape[1], arena.store(words), _padded(bias))


def _padded(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else _pad(bias.reshape(-1, 1), PANEL).flatten()


def _bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float()


def _pair(rows: torch.Tensor) -> torch.Tensor:
    """Interleaves gates and ups: [2 · inner, in] → [panels, 32, in]."""
    gates, ups = (_pad(half, LANES).view(-1, LANES, rows.shape[1]) for half in rows.chunk(2))
    return torch.cat((gates, ups), dim=1)


def _pad(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -len(rows) % multiple
    return torch.nn.functional.pad(rows, (0, 0, 0, missing))
