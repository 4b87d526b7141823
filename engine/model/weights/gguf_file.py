"""Tensors of a GGUF file by the names of the Hugging Face model, plain or as the rows of `quantised_matrix`.

Codes and minima are those of the file. A scale of Q4_K and Q6_K, and a minimum of Q4_K, is a product of a float16 and
an integer of the file that becomes a float16 again: it is off by up to 2⁻¹¹ of itself. The layout of the blocks is that
of ggml-quants.h; the gguf package has the same in numpy.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from moonserve.engine.model.config.gguf_folder import INDEX, WEIGHT_FORMATS, GgufTensor
from moonserve.engine.model.model_folder import read_json
from moonserve.engine.model.weights.quantised_matrix import QuantisedRows, WeightFormat
from moonserve.protocol.errors import ConfigError


class _Slice(GgufTensor):
    """A tensor with the interface of a slice of safetensors."""

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.type


class GgufFile:
    """A GGUF file with the interface of an open safetensors file."""

    def __init__(self, path: Path, folder: Path) -> None:
        """Maps the file of a model's folder. Raises ConfigError if it is not the file of which the folder was made."""
        index = read_json(folder / INDEX)
        try:
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) != (index["size"], index["mtime_ns"]):
                raise ConfigError(f"{path} has changed since it was opened: start again")
            self._octets = torch.from_numpy(np.memmap(path, np.uint8, "c"))  # torch warns of read-only memory
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        self._tensors = {name: _Slice(**fields) for name, fields in index["tensors"].items()}

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> _Slice:
        return self._tensors[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns a plain tensor, or the blocks [n, blocks of a row, bytes of a block] uint8 of a quantised one, in
        memory mapped from the file. The rows of q and k are in Hugging Face's order."""
        own = self._tensors[name]
        size, nbytes = _BLOCKS[own.type]
        octets = self._octets[own.offset : own.offset + math.prod(own.shape) // size * nbytes]
        dtype = _DTYPES.get(own.type)
        rows = octets.view(own.shape[0], -1, nbytes) if dtype is None else octets.view(dtype).view(own.shape)
        if own.heads is None:
            return rows
        # llama.cpp's order has the two halves of a head's rotary dimensions in turns.
        order = torch.arange(len(rows)).view(own.heads, -1, 2).transpose(1, 2).flatten()
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
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)} | {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}
"""Weights and bytes of a block."""


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
