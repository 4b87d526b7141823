"""Weights as integers of 4 or 8 bits with a scale per output and group of inputs: rounding, and the layout in memory.

weight = (code - zero) · scale, or code · scale - minimum, or of MXFP4 the number that the code stands for times a
power of two. `QuantisedRows` are rows as a checkpoint or a rounding gives them. A `QuantisedMatrix` has them in the
panels that the native products read (`engine/kernels/native/products/quantised_product.h`); it is filled row by row, so
that no matrix is in memory twice. Knows neither names of tensors nor files.
"""

import mmap
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from moonserve.protocol.errors import ConfigError

LANES = 16
PANEL = 2 * LANES
_WORD_BITS = 32
_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 64 << 20
FLOATS = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)
"""Twice the numbers of MXFP4 (E2M1 of the OCP Microscaling Formats): so they are integers."""
_AT_ONCE = 1 << 18
"""Weights that are converted at once, so that their copies stay in the cache: three times as fast as 2²⁴."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Format of one quantised matrix."""

    bits: int  # 4 or 8
    group: int  # inputs that share a scale
    has_zeros: bool = False  # True: each group also has a zero point; False: the zero is 0 in codes with sign
    has_mins: bool = False  # True: each group has a minimum instead, which is subtracted from code · scale
    is_float: bool = False  # True: codes of 4 bits stand for `FLOATS`; scales are bfloat16

    @property
    def implied_zero(self) -> int:
        """Zero of the codes as they are stored: codes of 4 bits have no sign. It is 0 beside minima."""
        return 8 if self.bits == 4 and not self.has_mins and not self.is_float else 0

    @property
    def inputs_per_word(self) -> int:
        return _WORD_BITS // self.bits

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_float else torch.float16


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows of a quantised matrix [n, in], with ceil(in / group) groups each."""

    codes: torch.Tensor  # [n, in] int8: 0..15 for 4 bits, -128..127 for 8 bits
    scales: torch.Tensor  # [n, groups] of the format's dtype
    zeros: torch.Tensor | None  # [n, groups] int16; None: the format's implied zero
    format: WeightFormat
    mins: torch.Tensor | None = None  # [n, groups] float16, of a format with minima

    @property
    def shape(self) -> list[int]:
        return list(self.codes.shape)

    def part(self, rows: slice, columns: slice) -> "QuantisedRows":
        """Returns a part of the matrix. Raises ConfigError if it cuts a group."""
        start, stop, _ = columns.indices(self.codes.shape[1])
        group = self.format.group
        if start % group or (stop % group and stop != self.codes.shape[1]):
            raise ConfigError(f"groups of {group} weights cannot be cut at {start} and {stop}; use fewer ranks")
        groups = slice(start // group, -(-stop // group))
        zeros, mins = (None if each is None else each[rows, groups] for each in (self.zeros, self.mins))
        return replace(self, codes=self.codes[rows, columns], scales=self.scales[rows, groups], zeros=zeros, mins=mins)

    def chunks(self) -> "Iterator[tuple[int, QuantisedRows]]":
        """Yields (first row, some rows) for conversions that need much memory per row."""
        for rows in _row_slices(self.codes):
            yield rows.start, self.part(rows, slice(None))

    def dequantised(self) -> torch.Tensor:
        """Returns the weights [n, in] in float32."""
        group, inputs = self.format.group, self.codes.shape[1]
        codes = FLOATS[self.codes.int()] if self.format.is_float else self.codes.float() - self._spread_zeros()
        weights = codes * _spread(self.scales.float(), group, inputs)
        return weights if self.mins is None else weights - _spread(self.mins.float(), group, inputs)

    def in_format(self, format: WeightFormat) -> "QuantisedRows":
        """Returns the same weights in their own format or a `common_format`."""
        if format == self.format:
            return self
        repeats, groups = self.format.group // format.group, -(-self.codes.shape[1] // format.group)
        scales, mins = (
            None if each is None else each.repeat_interleave(repeats, 1)[:, :groups]
            for each in (self.scales, self.mins)
        )
        assert scales is not None
        return QuantisedRows((self.codes - self._spread_zeros()).to(torch.int8), scales, None, format, mins)

    def _spread_zeros(self) -> torch.Tensor | int:
        """Returns the zero of each code, [n, in] or one for all."""
        implied = self.format.implied_zero
        return implied if self.zeros is None else _spread(self.zeros, self.format.group, self.codes.shape[1])


def common_format(formats: Collection[WeightFormat | None]) -> WeightFormat | None:
    """Returns the format that holds rows of all these formats exactly; None if one is plain or if there is none."""
    if len(set(formats)) == 1:
        return next(iter(formats))
    known = [each for each in formats if each is not None]
    if len(known) < len(formats) or any(each.is_float or (each.bits == 8 and each.has_zeros) for each in known):
        return None
    return WeightFormat(8, min(each.group for each in known), has_mins=any(each.has_mins for each in known))


def quantise(weights: torch.Tensor, format: WeightFormat) -> QuantisedRows:
    """Rounds weights [n, in] to the nearest codes of a format without zero points. With 4 bits, the weight of highest
    magnitude in a group becomes -8, whatever its sign: so all 16 codes are used."""
    rows, inputs = weights.shape
    grouped = _pad(weights.float(), format.group).view(rows, -1, format.group)
    least, most = grouped.amin(-1), grouped.amax(-1)
    if format.bits == 4:
        scales = torch.where(most >= -least, most, least) * -0.125
    else:
        scales = torch.maximum(most, -least) * (1.0 / 127.0)
    scales = scales.half() + 0.0  # no negative zero
    if not bool(scales.isfinite().all()):
        raise ConfigError("weights that are not finite, or too high for a float16 scale, cannot be quantised")
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales.float())
    lowest = -8 if format.bits == 4 else -128
    codes = (grouped * inverse[..., None]).round_().clamp_(lowest, -lowest - 1).add_(format.implied_zero)
    return QuantisedRows(codes.to(torch.int8).view(rows, -1)[:, :inputs], scales, None, format)


def rounded(weights: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """Returns the weights [n, in] that `format` stands for after rounding, in the dtype of `weights`."""
    result = torch.empty_like(weights)
    for rows in _row_slices(weights):
        result[rows] = quantise(weights[rows], format).dequantised()
    return result


class QuantisedMatrix:
    """Weights [out, in] in panels of 32 outputs. A panel of pairs has 16 gates, then the 16 ups that they multiply."""

    def __init__(
        self, outputs: int, inputs: int, format: WeightFormat, memory: "HugePages", *, pairs: bool = False
    ) -> None:
        """All weights are 0 at first. `pairs`: the matrix is gates above ups."""
        self.format = format
        self.inputs = inputs
        self.outputs = outputs
        self._pairs = pairs
        self.num_panels = -(-outputs // 2 // LANES) if pairs else -(-outputs // PANEL)
        groups = -(-inputs // format.group)
        self.words = groups * format.group // format.inputs_per_word  # of a row
        self.codes = memory.take(torch.int32, self.num_panels, self.words, PANEL)
        self.scales = memory.take(format.scale_dtype, self.num_panels, groups, PANEL)
        self.zeros = memory.take(torch.int16, self.num_panels, groups, PANEL) if format.has_zeros else None
        self.mins = memory.take(torch.float16, self.num_panels, groups, PANEL) if format.has_mins else None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.codes, self.scales, self.zeros, self.mins) if each is not None)

    def store(self, first: int, rows: QuantisedRows) -> None:
        """Stores rows from row `first` on, of this matrix's format or one that it is a `common_format` of."""
        if self.codes.is_meta:  # of another stage
            return
        for start, each in rows.chunks():
            some = each.in_format(self.format)
            panels, lanes = self._places(first + start, len(some.codes))
            self.codes[panels, :, lanes] = _words(_pad(some.codes, self.format.group), self.format)
            self.scales[panels, :, lanes] = some.scales
            if self.zeros is not None:
                self.zeros[panels, :, lanes] = _zeros(some)
            if self.mins is not None and some.mins is not None:
                self.mins[panels, :, lanes] = some.mins

    def round_and_store(self, first: int, weights: torch.Tensor) -> None:
        """Stores weights [n, in] from row `first` on, rounded to this matrix's format."""
        if not self.codes.is_meta:
            for rows in _row_slices(weights):
                self.store(first + rows.start, quantise(weights[rows], self.format))

    def _places(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the panel and the lane of each row."""
        rows = torch.arange(first, first + count)
        if not self._pairs:
            return rows // PANEL, rows % PANEL
        inner = self.outputs // 2
        row = rows % inner
        return row // LANES, row % LANES + LANES * (rows // inner)


class HugePages:
    """Memory for the matrices of a model, in huge pages if the system has them, since a step reads all of it once.
    Allocated from front to back, so that matrices lie in the order of reading; memory that stays unused only costs
    addresses. Zero at first."""

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Allocates a tensor of this shape, which starts at a cache line; on the meta device none."""
        if torch.empty(0).is_meta:
            return torch.empty(shape, dtype=dtype)
        count = dtype.itemsize
        for size in shape:
            count *= size
        if len(self._rest) < count:
            self._rest = self._map(max(count, self._chunk_bytes))
        taken, self._rest = self._rest[:count], self._rest[-(-count // 64) * 64 :]
        return taken.view(dtype).view(shape)

    @staticmethod
    def _map(nbytes: int) -> torch.Tensor:
        # Two more huge pages, since mapped memory may begin anywhere in a huge page.
        memory = mmap.mmap(-1, nbytes + 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE)
        with suppress(OSError, AttributeError):  # a kernel or a platform without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return flat[-flat.data_ptr() % _HUGE_PAGE :]


def _words(codes: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """Packs codes [n, whole groups] into words [n, words], the first input in the lowest bits."""
    if format.bits == 4:
        two = codes.view(torch.int16)
        codes = (two | two >> 4).to(torch.uint8)
    return codes.contiguous().view(torch.int32)


def _zeros(rows: QuantisedRows) -> torch.Tensor | int:
    return rows.format.implied_zero if rows.zeros is None else rows.zeros


def _spread(values: torch.Tensor, group: int, inputs: int) -> torch.Tensor:
    """Repeats values [n, groups] for each input: [n, in]."""
    return values.repeat_interleave(group, 1)[:, :inputs]


def _pad(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Appends zeros up to a whole number of groups of inputs."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % group))


def _row_slices(rows: torch.Tensor) -> Iterator[slice]:
    step = max(1, _AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        yield slice(start, min(start + step, len(rows)))
