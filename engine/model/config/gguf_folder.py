"""Makes the model folder of a GGUF file: config.json, generation_config.json, the tokenizer with its chat template, and
an index of the tensors.

The folder lies in the machine's cache and names the file, which keeps the weights (`engine.model.weights.gguf_file`).
Reading the vocabulary takes seconds, so only the first start does it.
transformers converts the configuration and the tokenizer; this module adds what it leaves out. Files with other
architectures, tensor types or rotary positions are refused before a weight is read. No torch; transformers and gguf are
imported when a file is opened.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.machine import cache_folder

INDEX = "gguf.json"
"""Size and time of the file, and its tensors."""
_VERSION = 1
"""Changes whenever this module writes something else into the folder of the same file."""
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_COUNTS = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
_VOCABULARY = tuple(f"tokenizer.ggml.{each}" for each in ("tokens", "merges", "scores", "token_type"))
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_POSITIONS = 8192  # of the pre-training of Llama 3


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """Format in memory of a quantised tensor type."""

    bits: int
    group: int
    has_mins: bool = False

    @property
    def bits_per_weight(self) -> float:
        return self.bits + (32 if self.has_mins else 16) / self.group


WEIGHT_FORMATS = {
    "F32": None,
    "F16": None,
    "BF16": None,
    "Q8_0": GgufFormat(8, 32),
    "Q4_0": GgufFormat(4, 32),
    "Q4_K": GgufFormat(4, 32, has_mins=True),
    "Q6_K": GgufFormat(8, 16),
}
"""Tensor types that are read; None: plain weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Place and type of a tensor in a file."""

    type: str
    shape: list[int]  # [out, in] or [n]
    offset: int  # bytes from the file's beginning
    heads: int | None  # whose rows llama.cpp reordered; None: it did not


@dataclass(frozen=True, slots=True)
class _Header:
    """Metadata and tensors of a supported GGUF file."""

    path: Path
    fields: dict[str, Any]  # metadata, without the vocabulary
    tensors: dict[str, GgufTensor]  # by the names of the Hugging Face model
    rope_factors: list[float]  # divisors of the rotary frequencies; empty: none

    @classmethod
    def read(cls, path: Path) -> "_Header":
        """Opens a file. Raises ConfigError, which says what would work."""
        try:
            from gguf import GGUFReader
        except ImportError as error:  # in the environment of another engine
            raise ConfigError(f"{path}: GGUF files need the package gguf: pip install 'moonserve[serve]'") from error
        try:
            reader = GGUFReader(path)
        except Exception as error:  # of the operating system and of a reader that trusts the file
            raise ConfigError(f"{path} cannot be read as GGUF: {type(error).__name__}: {error}") from error
        fields = {name: each.contents() for name, each in reader.fields.items() if not name.startswith(_VOCABULARY)}
        own, found = cls(path, fields, {}, []), {each.name: each for each in reader.tensors}
        own._require_architecture()
        factors = found.pop(_ROPE_FACTORS, None)
        for name, each in found.items():
            own.tensors[_hugging_face(name)] = GgufTensor(
                type=each.tensor_type.name,
                shape=[int(size) for size in reversed(each.shape)],
                offset=int(each.data_offset),
                heads=own._reordered_heads(name),
            )
        own._require_types()
        own.rope_factors.extend([] if factors is None else factors.data.tolist())
        return own

    def _require_architecture(self) -> None:
        experts = " with experts" if self.of_architecture("expert_count") else ""
        if experts or self.architecture not in _ARCHITECTURES:
            raise self.error(
                f"unsupported architecture: {self.architecture}{experts}; supported in GGUF are "
                f"{', '.join(_ARCHITECTURES)}; serve another model from its Hugging Face folder"
            )
        kv_heads = self.of_architecture("attention.head_count_kv")  # absent: as many as heads
        if isinstance(kv_heads, list) or any(not isinstance(self.of_architecture(name), int) for name in _COUNTS):
            raise self.error(
                f"{', '.join(_COUNTS)} must be one number each: layers of different shapes are not supported"
            )
        if (self.get("split.count") or 1) > 1:
            raise self.error("the model is split into several files: merge them with `llama-gguf-split --merge`")

    def _require_types(self) -> None:
        found = {
            each.type
            for each in self.tensors.values()
            if each.type not in WEIGHT_FORMATS or (len(each.shape) != 2 and WEIGHT_FORMATS[each.type] is not None)
        }
        if found:
            raise self.error(
                f"tensors in {', '.join(sorted(found))} are not supported, only {', '.join(WEIGHT_FORMATS)}: use a "
                "file in Q4_K_M, Q8_0 or BF16, or the model's Hugging Face folder with --quantize"
            )

    def error(self, complaint: str) -> ConfigError:
        return ConfigError(f"{self.path}: {complaint}")

    def get(self, name: str) -> Any:
        """Returns a field of the metadata, or None if it is absent."""
        return self.fields.get(name)

    def of_architecture(self, name: str) -> Any:
        return self.get(f"{self.architecture}.{name}")

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture"))

    def _reordered_heads(self, name: str) -> int | None:
        if self.architecture != "llama" or not any(part in name for part in (".attn_q.", ".attn_k.")):
            return None
        heads = self.of_architecture("attention.head_count")
        return int(heads if ".attn_q." in name else self.of_architecture("attention.head_count_kv") or heads)

    def bits_per_weight(self, names: Iterable[str]) -> float | None:
        """Returns the mean bits in memory of matrices; None: all are plain. A fused matrix of several formats takes
        more."""
        formats = [(math.prod(each.shape), WEIGHT_FORMATS[each.type]) for each in map(self.tensors.__getitem__, names)]
        if all(format is None for _, format in formats):
            return None
        bits = sum(size * (16 if format is None else format.bits_per_weight) for size, format in formats)
        return bits / sum(size for size, _ in formats)


def _hugging_face(name: str) -> str:
    """Returns the Hugging Face name of a tensor, or the same name for one that the own families lack."""
    match = _NAME.fullmatch(name)
    if match is None or match[2] not in _MODULES:
        return name
    return f"{'' if match[1] is None else f'model.layers.{match[1]}.'}{_MODULES[match[2]]}.{match[3]}"


def gguf_folder(path: Path) -> Path:
    """Returns the folder of a GGUF file as it is now, made by the first call. Raises ConfigError."""
    try:
        path = path.resolve()
        status = path.stat()
        identity = f"{_VERSION}|{path}|{status.st_size}|{status.st_mtime_ns}"
        digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        folder = cache_folder(os.environ, Path.home()) / "gguf" / f"{path.stem}-{digest}"
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=folder.parent) as temporary:
                made = Path(temporary) / "model"
                _write(_Header.read(path), status, made)
                _publish(made, folder)
    except OSError as error:
        raise ConfigError(f"the model folder of {path} cannot be made: {error}") from error
    return folder


def _publish(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise


def _write(header: _Header, status: os.stat_result, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    rope = _rope(header)
    source, name = str(header.path.parent), header.path.name
    try:
        fields = AutoConfig.from_pretrained(source, gguf_file=name).to_dict()
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    except Exception as error:  # of many converters
        raise header.error(f"transformers cannot convert it: {type(error).__name__}: {error}") from error
    tokenizer.save_pretrained(folder)
    fields |= _own_fields(header, rope)
    (folder / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    ends = [header.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    generation = {"eos_token_id": [each for each in dict.fromkeys(ends) if each is not None]}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    index = {"size": status.st_size, "mtime_ns": status.st_mtime_ns} | {
        "tensors": {name: asdict(each) for name, each in header.tensors.items()}
    }
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _own_fields(header: _Header, rope: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of config.json that transformers leaves out or takes from defaults."""
    heads, hidden = header.of_architecture("attention.head_count"), header.of_architecture("embedding_length")
    matrices = [name for name in header.tensors if name.endswith("_proj.weight")]
    is_tied = "lm_head.weight" not in header.tensors
    head = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    if not matrices or "model.embed_tokens.weight" not in header.tensors:
        raise header.error("the file has no weights of a decoder")
    head_dim = header.of_architecture("attention.key_length") or hidden // heads
    if (header.of_architecture("rope.dimension_count") or head_dim) != head_dim:
        raise header.error("rotary positions of a part of a head are not supported")
    bits, types = header.bits_per_weight(matrices), {header.tensors[name].type for name in matrices}
    quantised = {"quant_method": "gguf", "file": str(header.path), "bits_per_weight": bits}
    return {
        "architectures": [_ARCHITECTURES[header.architecture]],
        "head_dim": head_dim,
        "vocab_size": header.tensors["model.embed_tokens.weight"].shape[0],
        "tie_word_embeddings": is_tied,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in header.tensors,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in header.tensors,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "dtype": "float32" if types == {"F32"} else "bfloat16",
        "bos_token_id": header.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.get("tokenizer.ggml.padding_token_id"),
        "quantization_config": quantised | {"head_bits": header.bits_per_weight([head])},
    }


def _rope(header: _Header) -> dict[str, Any]:
    """Returns the rotary settings. Raises ConfigError for other kinds than linear, YaRN and Llama 3's."""
    theta = float(header.of_architecture("rope.freq_base") or 10_000.0)
    kind = header.of_architecture("rope.scaling.type") or "none"
    original = header.of_architecture("rope.scaling.original_context_length")
    settings: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if kind in ("linear", "yarn"):
        settings |= {"rope_type": kind, "factor": float(header.of_architecture("rope.scaling.factor") or 1.0)}
        if kind == "yarn" and original:
            settings["original_max_position_embeddings"] = int(original)
    elif kind != "none":
        raise header.error(f"rotary positions scaled by {kind!r} are not supported, only by linear and yarn")
    return settings | _llama3(header, theta, int(original or _LLAMA3_POSITIONS)) if header.rope_factors else settings


def _llama3(header: _Header, theta: float, original: int) -> dict[str, Any]:
    """Returns Llama 3's settings, of which the file has only the divisors of the frequencies. Raises ConfigError if
    other settings made these."""
    divisors = header.rope_factors
    factor, low, high = round(max(divisors), 3), 1.0, 4.0
    for place, divisor in enumerate(divisors):
        turns = original * theta ** (-place / len(divisors)) / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(divisor, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-3):
            raise header.error(f"the rotary factors in {_ROPE_FACTORS} are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
