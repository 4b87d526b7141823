"""Tensors of a GGUF file by the names of the Hugging Face model, plain or as the rows of `quantised_matrix`.

Codes and minima are those of the file. A scale of Q4_K and Q6_K, and a minimum of Q4_K, is a product of a float16 and
an integer of the file that becomes a float16 again: it is off by up to 2⁻¹¹ of itself. The layout of the blocks is that
of ggml-quants.h; the gguf package has the same in numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moonserve.engine.model.config.gguf_folder import WEIGHT_FORMATS, GgufHeader
from moonserve.engine.model.weights.quantised_matrix import QuantisedRows, WeightFormat
from moonserve.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Slice:
    """Shape and type of a tensor, like the slices of safetensors."""

    shape: list[int]
    type: str

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.type


class GgufFile:
    """A GGUF file with the interface of an open safetensors file. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self._header = GgufHeader.read(path)
        self._tensors = self._header.tensors

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> _Slice:
        own = self._tensors[name]
        return _Slice([int(size) for size in reversed(own.shape)], own.tensor_type.name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns a plain tensor, or the blocks [n, blocks of a row, bytes of a block] uint8 of a quantised one, in
        memory mapped from the file. The rows of q and k are in Hugging Face's order."""
        own = self._tensors[name]
        rows, type = torch.from_numpy(own.data), own.tensor_type.name
        if type == "BF16":
            rows = rows.view(torch.bfloat16)
        elif WEIGHT_FORMATS[type] is not None:
            rows = rows.view(len(rows), -1, _BLOCK_BYTES[type])
        heads = self._header.interleaved_heads(name)
        if heads is None:
            return rows
        # llama.cpp's order has the two halves of a head's rotary dimensions in turns.
        order = torch.arange(len(rows)).view(heads, -1, 2).transpose(1, 2).flatten()
        return rows[order]


def weight_format(type: str) -> WeightFormat | None:
    """Returns the format in which a GGUF type is kept; None: it is plain."""
    own = WEIGHT_FORMATS[type]
    return None if own is None else WeightFormat(own.bits, own.group, has_mins=own.has_mins)


def _q8_0(blocks: torch.Tensor) -> QuantisedRows:
    scales, codes = torch.split(blocks, [2, 32], -1)
    return _rows("Q8_0", codes.view(torch.int8), _float16(scales))


def _q4_0(blocks: torch.Tensor) -> QuantisedRows:
    scales, octets = torch.split(blocks, [2, 16], -1)
    return _rows("Q4_0", _nibbles(octets, 16), _float16(scales))


def _q4_k(blocks: torch.Tensor) -> QuantisedRows:
    scale, minimum, parts, octets = torch.split(blocks, [2, 2, 12, 128], -1)
    scales, mins, last = torch.split(parts, 4, -1)  # 6 bits of 4 groups each, then 4 bits of both of the other groups
    scales = torch.cat((scales & 63, last & 15 | scales >> 2 & 48), -1)
    mins = torch.cat((mins & 63, last >> 4 | mins >> 2 & 48), -1)
    return _rows("Q4_K", _nibbles(octets, 32), _float16(scale) * scales, _float16(minimum) * mins)


def _q6_k(blocks: torch.Tensor) -> QuantisedRows:
    low, high, scales, scale = torch.split(blocks, [128, 64, 16, 2], -1)
    places = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    upper = (high.reshape(*high.shape[:-1], 2, 1, 32) >> places & 3).flatten(-3)  # for each half: 4 times 32 inputs
    codes = (_nibbles(low, 64) | upper << 4).view(torch.int8) - 32
    return _rows("Q6_K", codes, _float16(scale) * scales.view(torch.int8))


DECODERS: dict[str, Callable[[torch.Tensor], QuantisedRows]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
_BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_K": 144, "Q6_K": 210}


def _nibbles(octets: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the codes [n, blocks, 2 · octets]: of each `size` octets the low halves, then the high ones."""
    pieces = octets.reshape(*octets.shape[:-1], -1, size)
    return torch.cat((pieces & 15, pieces >> 4), -1).flatten(-2)


def _float16(octets: torch.Tensor) -> torch.Tensor:
    """Returns the float16 in pairs of bytes [n, blocks, 2], in float32."""
    return octets.contiguous().view(torch.float16).float()


def _rows(type: str, codes: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor | None = None) -> QuantisedRows:
    """Returns rows for codes [n, blocks, inputs of a block], scales and minima [n, blocks, groups of a block]."""
    format = weight_format(type)
    assert format is not None
    halves = [None if each is None else each.half().flatten(1) for each in (scales, mins)]
    if not all(bool(each.isfinite().all()) for each in halves if each is not None):
        raise ConfigError(f"scales of {type} weights exceed the range of float16")
    assert halves[0] is not None
    return QuantisedRows(codes.flatten(1).view(torch.int8), halves[0], None, format, halves[1])
