"""Tensors of a checkpoint, plain or quantised, by the names of plain weights.

A quantised weight is several tensors: codes packed into 32-bit words in the order of its method, scales, zero points.
Each becomes rows of `quantised_matrix`; weights in fp8 become float32. Knows neither files nor the model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moonserve.engine.model.config.quantised_checkpoint import QuantisedCheckpoint
from moonserve.engine.model.weights.gguf_file import DECODERS, weight_format
from moonserve.engine.model.weights.quantised_matrix import QuantisedRows, WeightFormat
from moonserve.protocol.errors import ConfigError

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of 8 consecutive outputs
_PARTS = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape"),
    "awq": ("qweight", "scales", "qzeros"),
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
}
_OF_INTEGERS = ("weight", "weight_scale", "weight_zero_point")
_OF_FP8 = ("weight", "weight_scale", "weight_scale_inv")
_OPTIONAL = ("weight_zero_point", "weight_shape", "qzeros", "g_idx", "weight_scale", "weight_scale_inv")
_MXFP4 = WeightFormat(4, 32, is_float=True)
_IGNORED = ("input_scale", "input_zero_point", "k_scale", "v_scale", "q_scale")  # of activations and of KV

Parts = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A weight of a checkpoint."""

    names: Mapping[str, str]  # name of each stored tensor by its part
    shape: list[int]
    format: WeightFormat | None  # None: it is plain, or in fp8
    decode: Callable[[Parts], torch.Tensor | QuantisedRows]


def stored_tensors(
    shapes: Mapping[str, list[int]], dtypes: Mapping[str, str], checkpoint: QuantisedCheckpoint | None
) -> dict[str, StoredTensor]:
    """Returns the weights by name, sorted. `shapes`, `dtypes`: of each tensor in the files. A module is quantised if it
    has such tensors, whatever config.json says of it."""
    if checkpoint is not None and checkpoint.method == "gguf":
        return {
            name: StoredTensor({"weight": name}, shape, weight_format(dtypes[name]), partial(_gguf, dtypes[name]))
            for name, shape in sorted(shapes.items())
        }
    found = dict(_stacks(shapes))
    used = {name for stack in found.values() for name in stack.names.values()}
    if checkpoint is not None:
        for name in shapes:
            module, _, part = name.rpartition(".")
            if _has_codes(checkpoint, part, dtypes[name]):
                parts = _parts_of(checkpoint, module, part, shapes)
                found[f"{module}.weight"] = _quantised(checkpoint, parts, shapes)
                used.update(parts.values())
    plain = {
        name: StoredTensor({"weight": name}, shape, None, _plain)
        for name, shape in shapes.items()
        if name not in used and not (checkpoint is not None and name.rpartition(".")[2] in _IGNORED)
    }
    return dict(sorted((plain | found).items()))


def _stacks(shapes: Mapping[str, list[int]]) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the weights of all experts of a layer that are one tensor (gpt-oss), as one matrix: the outputs of the
    first expert, then those of the second one."""
    for name, shape in shapes.items():
        if name.endswith("_blocks") and len(shape) == 4:  # [experts, out, groups, 16]
            module = name.removesuffix("_blocks")
            parts = {"blocks": name, "scales": f"{module}_scales"}
            if parts["scales"] not in shapes:
                raise ConfigError(f"{module} is quantised by mxfp4 but lacks its scales")
            size = [shape[0] * shape[1], shape[2] * _MXFP4.group]
            yield module, StoredTensor(parts, size, _MXFP4, _mxfp4)
        elif len(shape) == 3 and not name.endswith("_scales"):  # [experts, in, out]
            size = [shape[0] * shape[2], shape[1]]
            yield name, StoredTensor({"weight": name}, size, None, lambda parts: parts["weight"].mT.flatten(0, 1))


def _has_codes(checkpoint: QuantisedCheckpoint, part: str, dtype: str) -> bool:
    """True for the tensor that has the codes of a quantised weight."""
    if part == "weight":
        return dtype == ("F8_E4M3" if checkpoint.is_float else "I8")
    return not checkpoint.is_float and part == _PARTS.get(checkpoint.method, ("",))[0]


def _parts_of(checkpoint: QuantisedCheckpoint, module: str, code: str, shapes: Mapping[str, Any]) -> dict[str, str]:
    of_weight = _OF_FP8 if checkpoint.is_float else _OF_INTEGERS
    wanted = of_weight if code == "weight" else _PARTS[checkpoint.method]
    parts = {part: f"{module}.{part}" for part in wanted if f"{module}.{part}" in shapes}
    missing = [part for part in wanted if part not in parts and part not in _OPTIONAL]
    if missing or not {"weight_scale", "weight_scale_inv", "scales"} & parts.keys():
        raise ConfigError(
            f"{module} is quantised by {checkpoint.method} but lacks {', '.join(missing) or 'its scales'}"
        )
    return parts


def _quantised(
    checkpoint: QuantisedCheckpoint, parts: Mapping[str, str], shapes: Mapping[str, list[int]]
) -> StoredTensor:
    if "weight" in parts and checkpoint.is_float:
        return StoredTensor(parts, shapes[parts["weight"]], None, _fp8)
    format = WeightFormat(checkpoint.bits, checkpoint.group, checkpoint.has_zeros)
    per_word = format.inputs_per_word
    first, second = shapes[next(iter(parts.values()))]
    if checkpoint.method == "awq":
        return StoredTensor(parts, [second * per_word, first], format, partial(_awq, format))
    if checkpoint.method == "gptq":
        decode = partial(_gptq, format, checkpoint.zero_offset)
        return StoredTensor(parts, [second, first * per_word], format, decode)
    inputs = second if "weight" in parts else second * per_word
    return StoredTensor(parts, [first, inputs], format, partial(_compressed, format))


def _plain(parts: Parts) -> torch.Tensor:
    return parts["weight"]


def _mxfp4(parts: Parts) -> QuantisedRows:
    codes, exponents = _unpacked(parts["blocks"].flatten(2).flatten(0, 1), 4), parts["scales"].flatten(0, 1)
    return QuantisedRows(codes.view(torch.int8), (exponents.float() - 128).exp2().bfloat16(), None, _MXFP4)


def _gguf(type: str, parts: Parts) -> torch.Tensor | QuantisedRows:
    decode = DECODERS.get(type)
    return parts["weight"] if decode is None else decode(parts["weight"])


def _fp8(parts: Parts) -> torch.Tensor:
    weight = parts["weight"].float()
    scales = parts.get("weight_scale_inv", parts.get("weight_scale"))
    assert scales is not None
    scales = scales.float()
    if scales.ndim < 2:  # of the tensor, or of each output
        return weight * (scales if scales.numel() == 1 else scales[:, None])
    # [blocks of outputs, blocks of inputs]: of 128 each, or one for all
    for dim in (0, 1):
        size = weight.shape[dim]
        block = size if scales.shape[dim] == 1 else 1 if scales.shape[dim] == size else 128
        scales = scales.repeat_interleave(block, dim).narrow(dim, 0, size)
    return weight * scales


def _compressed(format: WeightFormat, parts: Parts) -> QuantisedRows:
    half = 1 << (format.bits - 1)
    packed = parts.get("weight_packed")  # otherwise a code with sign in each byte
    codes = parts["weight"].int() + half if packed is None else _unpacked(packed, format.bits)
    if "weight_shape" in parts:
        codes = codes[:, : int(parts["weight_shape"][1])]
    zeros = parts.get("weight_zero_point") if format.has_zeros else None
    if zeros is not None and zeros.dtype == torch.int32 and packed is not None:  # packed along the outputs
        zeros = _unpacked(zeros.T, format.bits).T[: len(codes)]
    elif zeros is not None:
        zeros = zeros.int() + half
    scales = parts["weight_scale"]
    return _rows(format, codes, scales.expand(len(codes), -1) if scales.ndim < 2 else scales, zeros)


def _awq(format: WeightFormat, parts: Parts) -> QuantisedRows:
    def unpacked(words: torch.Tensor) -> torch.Tensor:
        codes = _unpacked(words, format.bits).view(len(words), -1, len(_AWQ_ORDER))
        return codes[:, :, list(_AWQ_ORDER)].flatten(1).T

    zeros = unpacked(parts["qzeros"]) if format.has_zeros else None
    return _rows(format, unpacked(parts["qweight"]), parts["scales"].T, zeros)


def _gptq(format: WeightFormat, zero_offset: int, parts: Parts) -> QuantisedRows:
    codes = _unpacked(parts["qweight"].T, format.bits)
    scales = parts["scales"].T
    if "g_idx" in parts:
        groups = torch.arange(codes.shape[1]) // -(-codes.shape[1] // scales.shape[1])
        if not torch.equal(parts["g_idx"].long(), groups):
            raise ConfigError("weights quantised by gptq with inputs out of their order (g_idx) are not supported")
    zeros = _unpacked(parts["qzeros"], format.bits).T.int() + zero_offset
    if format.has_zeros:
        return _rows(format, codes, scales, zeros)
    if bool((zeros != 1 << (format.bits - 1)).any()):
        raise ConfigError("weights quantised by gptq have zero points although config.json says sym")
    return _rows(format, codes, scales, None)


def _rows(format: WeightFormat, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> QuantisedRows:
    """Returns rows for codes and zero points without sign. Scales of more inputs than a group are repeated."""
    half = 0 if format.bits == 4 else 128
    inputs = codes.shape[1]
    groups = -(-inputs // format.group)
    repeated = -(-groups // scales.shape[1])
    rounded = scales.half()
    if not bool(rounded.isfinite().all()) or bool(((rounded == 0) != (scales == 0)).any()):
        raise ConfigError("scales of quantised weights exceed the range of float16")
    own = rounded.repeat_interleave(repeated, 1)[:, :groups]
    if format.has_zeros and zeros is not None:
        zeros = (zeros.int() - half).to(torch.int16).repeat_interleave(repeated, 1)[:, :groups]
    return QuantisedRows((codes.int() - half).to(torch.int8).contiguous(), own, zeros, format)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpacks int32 words [n, words] into codes without sign [n, codes], uint8, the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)
