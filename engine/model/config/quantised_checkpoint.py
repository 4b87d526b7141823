"""Reads from config.json how weights are quantised, and refuses methods that are not supported. No torch.

The tensors of each method are read by `engine.model.weights.stored_tensors`.
"""

from dataclasses import dataclass

from moonserve.engine.model.model_folder import JsonFields
from moonserve.protocol.errors import ConfigError

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
"""Formats of compressed-tensors."""
GROUP = 128
"""Weights that share a scale in memory, at most: a scale of more weights is repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedCheckpoint:
    """Format of the quantised matrices of a checkpoint."""

    method: str  # compressed-tensors, awq, gptq, fp8, mxfp4 or gguf
    bits: int  # 4 or 8, of a GGUF file at most
    group: int = GROUP  # inputs that share a scale: 32, 64 or 128, also if a stored scale is for more
    has_zeros: bool = False  # True: with zero points
    is_float: bool = False  # True: fp8 (E4M3) or plain GGUF, which is computed in the model's dtype
    zero_offset: int = 0  # added to stored zero points
    file: str = ""  # the GGUF file with the weights; empty: safetensors in the model's folder
    mean_bits: float | None = None  # bits_per_weight of a GGUF file, whose tensors differ
    head_bits: float | None = None  # the same of its head; None: the head is plain

    @property
    def bits_per_weight(self) -> float:
        """Bits in memory, with scales and zero points."""
        if self.mean_bits is not None:
            return self.mean_bits
        return 16.0 if self.is_float else self.bits + (32 if self.has_zeros else 16) / self.group


def require_plain_weights(fields: JsonFields) -> None:
    """Raises ConfigError for quantised weights, of models that only transformers computes."""
    found = _settings(fields)
    if found is not None:
        raise _unsupported(found, "with this architecture")


def read_quantised_checkpoint(fields: JsonFields) -> QuantisedCheckpoint | None:
    """Returns the format of quantised weights, or None if they are plain. Raises ConfigError for unsupported ones."""
    own = _settings(fields)
    if own is None:
        return None
    method = own.text("quant_method", default="")
    if method == "compressed-tensors":
        return _compressed(own)
    if method == "awq":
        return _awq(own)
    if method == "gptq":
        return _gptq(own)
    if method == "fp8":
        return QuantisedCheckpoint(method=method, bits=8, is_float=True)
    if method == "mxfp4":  # of experts only; the other weights are plain
        return QuantisedCheckpoint(method=method, bits=4, group=32)
    if method == "gguf":
        return _gguf(own)
    raise _unsupported(own, "here")


def _settings(fields: JsonFields) -> JsonFields | None:
    return fields.nested("quantization_config") or fields.nested("compression_config")


def _unsupported(own: JsonFields, why: str) -> ConfigError:
    method = own.text("quant_method", default="an unnamed method")
    return own.error(
        f"weights quantised by {method} are not supported {why}; serve them with --engine vllm, or a checkpoint in "
        "bfloat16, float16 or float32, which --quantize can round"
    )


def _awq(own: JsonFields) -> QuantisedCheckpoint:
    version, bits = own.text("version", default="gemm").lower(), own.count("bits", default=4)
    if version != "gemm" or bits != 4:
        raise _unsupported(own, f"as {version} with {bits} bits, only as gemm with 4")
    group = _group(own, own.optional_count("group_size", minimum=-1))
    return QuantisedCheckpoint(method="awq", bits=4, group=group, has_zeros=own.flag("zero_point", default=True))


def _gptq(own: JsonFields) -> QuantisedCheckpoint:
    bits, version = own.count("bits"), own.text("checkpoint_format", default="gptq")
    group = own.optional_count("group_size", minimum=-1)
    if bits not in (4, 8) or version not in ("gptq", "gptq_v2"):
        raise _unsupported(own, f"as {version} with {bits} bits, only with 4 or 8")
    if own.flag("desc_act", default=False) and (group or -1) > 0:
        raise _unsupported(own, "with desc_act, which takes inputs out of their order")
    if own.nested("dynamic") is not None:
        raise _unsupported(own, "with other settings for some modules (dynamic)")
    return QuantisedCheckpoint(
        method="gptq",
        bits=bits,
        group=_group(own, group),
        has_zeros=not own.flag("sym", default=True),
        zero_offset=1 if version == "gptq" else 0,
    )


def _gguf(own: JsonFields) -> QuantisedCheckpoint:
    """Reads what `gguf_folder` wrote."""
    bits, head = own.optional_number("bits_per_weight"), own.optional_number("head_bits")
    file = own.text("file", default="")
    if not file:
        raise own.error("file is missing: give `moonserve serve` the GGUF file itself")
    return QuantisedCheckpoint(method="gguf", bits=8, is_float=bits is None, file=file, mean_bits=bits, head_bits=head)


def _compressed(own: JsonFields) -> QuantisedCheckpoint:
    format = own.text("format", default="")
    groups = own.nested("config_groups")
    names = [] if groups is None else groups.objects()
    if format not in _FORMATS or groups is None or len(names) != 1:
        raise _unsupported(own, f"in format {format!r} with {len(names)} groups of modules")
    group = groups.nested(names[0])
    weights = None if group is None else group.nested("weights")
    if weights is None:
        raise _unsupported(own, "without settings of weights")
    bits, kind = weights.count("num_bits"), weights.text("type", default="int")
    if kind == "float" and bits == 8:
        return QuantisedCheckpoint(method="compressed-tensors", bits=8, is_float=True)
    strategy = weights.text("strategy", default="tensor")
    if kind != "int" or bits not in (4, 8) or strategy not in ("group", "channel", "tensor"):
        raise _unsupported(own, f"as {kind} of {bits} bits by {strategy}")
    if weights.text("actorder", default="static") not in ("static", "weight"):
        raise _unsupported(own, "with actorder group, which takes inputs out of their order")
    return QuantisedCheckpoint(
        method="compressed-tensors",
        bits=bits,
        group=_group(own, weights.optional_count("group_size", minimum=-1)),
        has_zeros=not weights.flag("symmetric", default=True),
    )


def _group(own: JsonFields, size: int | None) -> int:
    """Returns the group in memory for one in a checkpoint; -1 or none is a whole row."""
    if size is None or size < 1 or size % GROUP == 0:
        return GROUP
    if size not in (32, 64):
        raise _unsupported(own, f"in groups of {size}, only of 32, 64 or multiples of {GROUP}")
    return size
