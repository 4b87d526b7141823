"""Loads a checkpoint from safetensors files, sharded or not, into the fused matrices of the forward pass.

Owns tensor names and shapes, and the digest of the stored bytes and of the configuration that determines KV. Names and
shapes are checked against the file headers before any tensor is read, so a wrong folder is refused at once with a list
of problems. Does not know how weights are used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from moonserve.engine.model.config import ModelConfig
from moonserve.engine.model.partition import Shard, Stage, split_into_shards, split_into_stages
from moonserve.protocol.errors import ConfigError

LOAD_FORMATS = ("auto", "dummy")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMES_SHOWN = 5
_DUMMY_SEED = 0
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # stored by old exporters, but computed here

Progress = Callable[[str, float], None]
"""Progress callback: name of the current activity and the fraction done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one decoder layer; matrices are [out, in]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor  # q rows, then k, then v
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]: norms of q and k, repeated per head
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor  # gate rows, then up
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of a model, or of one stage or rank. With tied embeddings a whole model's `lm_head` is `embedding`."""

    embedding: torch.Tensor  # [vocab, hidden]; no rows except at the first stage
    layers: Sequence[LayerWeights]  # of the stage
    norm: torch.Tensor
    lm_head: torch.Tensor  # [vocab, hidden], a rank has its rows only; no rows except at the last stage
    # Hash of `kv_identity` and all stored tensors (names, dtypes, shapes, bytes), whatever the share.
    digest: str


@dataclass(frozen=True, slots=True)
class _Destination:
    """Destination of a stored tensor of `shape`, or of a part of it."""

    own: torch.Tensor
    shape: list[int]
    part: tuple[slice, ...] = ()

    def fill(self, stored: torch.Tensor) -> None:
        self.own.copy_(stored[self.part])


_Places = dict[str, list[_Destination]]


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    load_format: str = "auto",
    progress: Progress | None = None,
    device: torch.device | None = None,
    stage: Stage | None = None,
    shard: Shard | None = None,
) -> Weights:
    """Loads the weights of the model, or of one stage or rank, in `dtype` on `device` (None = CPU). Raises ConfigError
    that lists missing, unexpected and misshapen tensors."""
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    with device or torch.device("cpu"):
        places, build = _allocate(config, dtype, stage, shard or split_into_shards(config, 1)[0])
    if load_format == "dummy":
        return build(_fill_randomly(config, places))
    return build(_fill_from_files(path, config, places, progress or (lambda _stage, _done: None)))


# -- destinations of stored tensors


def _allocate(
    config: ModelConfig, dtype: torch.dtype, stage: Stage | None, shard: Shard
) -> tuple[_Places, Callable[[str], Weights]]:
    """Allocates empty weights. Returns the destinations of each stored tensor by name, and a function from the digest
    to the weights. Tensors of other stages are also read, for the digest, into tensors without memory."""
    places: _Places = {}
    whole = stage or split_into_stages(config.num_layers, 1)[0]

    def vocabulary(name: str, is_own: bool, tokens: range) -> torch.Tensor:
        with _elsewhere(not is_own):
            tensor = torch.empty(len(tokens), config.hidden_size, dtype=dtype)
        stored = [config.vocab_size, config.hidden_size]
        places[name] = [_Destination(tensor, stored, (slice(tokens.start, tokens.stop),))]
        return tensor if is_own else torch.empty(0, config.hidden_size, dtype=dtype)

    tied, tokens = config.tie_word_embeddings, range(config.vocab_size)
    is_own = whole.is_first or (tied and whole.is_last)
    embedding = vocabulary("model.embed_tokens.weight", is_own, tokens)
    layers = []
    for layer in range(config.num_layers):
        with _elsewhere(layer not in whole.layers):
            layers.append(_allocate_layer(config, dtype, layer, places, shard))
    norm = torch.empty(config.hidden_size, dtype=dtype)
    places["model.norm.weight"] = [_Destination(norm, list(norm.shape))]
    if not tied:
        lm_head = vocabulary("lm_head.weight", whole.is_last, shard.vocabulary)
    elif shard.size == 1:
        lm_head = embedding
    else:
        lm_head = embedding[shard.vocabulary.start : shard.vocabulary.stop]

    def build(digest: str) -> Weights:
        return Weights(
            embedding=embedding if whole.is_first else embedding[:0],
            layers=layers[whole.layers.start : whole.layers.stop],
            norm=norm,
            lm_head=lm_head if whole.is_last else lm_head[:0],
            digest=digest,
        )

    return places, build


def _elsewhere(is_so: bool) -> AbstractContextManager[object]:
    """Context in which tensors are allocated without memory if `is_so`."""
    return torch.device("meta") if is_so else nullcontext()


@dataclass(frozen=True, slots=True)
class _Part:
    """Range of one dimension of a stored tensor that is loaded."""

    size: int
    own: range

    @property
    def slice(self) -> slice:
        return slice(self.own.start, self.own.stop)


def _allocate_layer(config: ModelConfig, dtype: torch.dtype, layer: int, places: _Places, shard: Shard) -> LayerWeights:
    def plain(name: str, size: int, columns: _Part | None = None) -> torch.Tensor:
        shape = [size] if columns is None else [size, len(columns.own)]
        tensor = torch.empty(shape, dtype=dtype)
        place = _Destination(tensor, [size])
        if columns is not None:
            place = _Destination(tensor, [size, columns.size], (slice(None), columns.slice))
        places[f"model.layers.{layer}.{name}"] = [place]
        return tensor

    def fused(module: str, names: Sequence[str], kind: str, rows: Sequence[_Part], *columns: int) -> torch.Tensor:
        sizes = [len(part.own) for part in rows]
        tensor = torch.empty((sum(sizes), *columns), dtype=dtype)
        for name, part, view in zip(names, rows, torch.split(tensor, sizes), strict=True):
            place = _Destination(view, [part.size, *columns], (part.slice,))
            places[f"model.layers.{layer}.{module}.{name}.{kind}"] = [place]
        return tensor

    def once(bias: torch.Tensor) -> torch.Tensor | None:
        # The product is summed over ranks, so only one of them may add the bias.
        return bias if shard.is_first else None

    hidden, inner = config.hidden_size, _Part(config.intermediate_size, shard.inner)
    q_rows = _of_heads(config, config.num_heads, shard.heads)
    kv_rows = _of_heads(config, config.num_kv_heads, shard.kv_heads)
    qkv = ("self_attn", ("q_proj", "k_proj", "v_proj"))
    qkv_rows = (q_rows, kv_rows, kv_rows)
    gate_up = ("mlp", ("gate_proj", "up_proj"))
    return LayerWeights(
        input_norm=plain("input_layernorm.weight", hidden),
        qkv=fused(*qkv, "weight", qkv_rows, hidden),
        qkv_bias=fused(*qkv, "bias", qkv_rows) if config.qkv_bias else None,
        qk_norm=_allocate_qk_norm(config, dtype, layer, places, shard) if config.qk_norm else None,
        o=plain("self_attn.o_proj.weight", hidden, q_rows),
        o_bias=once(plain("self_attn.o_proj.bias", hidden)) if config.o_bias else None,
        post_norm=plain("post_attention_layernorm.weight", hidden),
        gate_up=fused(*gate_up, "weight", (inner, inner), hidden),
        gate_up_bias=fused(*gate_up, "bias", (inner, inner)) if config.mlp_bias else None,
        down=plain("mlp.down_proj.weight", hidden, inner),
        down_bias=once(plain("mlp.down_proj.bias", hidden)) if config.mlp_bias else None,
    )


def _of_heads(config: ModelConfig, count: int, own: range) -> _Part:
    """Returns the rows of heads `own` in a projection to `count` heads."""
    dim = config.head_dim
    return _Part(count * dim, range(own.start * dim, own.stop * dim))


def _allocate_qk_norm(
    config: ModelConfig, dtype: torch.dtype, layer: int, places: _Places, shard: Shard
) -> torch.Tensor:
    tensor = torch.empty(len(shard.heads) + len(shard.kv_heads), config.head_dim, dtype=dtype)
    rows = [_Destination(row, [config.head_dim]) for row in tensor.unbind(0)]
    places[f"model.layers.{layer}.self_attn.q_norm.weight"] = rows[: len(shard.heads)]
    places[f"model.layers.{layer}.self_attn.k_norm.weight"] = rows[len(shard.heads) :]
    return tensor


# -- filling


def _fill_randomly(config: ModelConfig, places: _Places) -> str:
    """Fills matrices with normal numbers, norms with 1 and biases with 0, equal on every machine for a configuration.
    Returns the digest."""
    generator = torch.Generator().manual_seed(_DUMMY_SEED)
    for name, own in places.items():
        shape = own[0].shape
        value = torch.randn(shape, generator=generator) * config.initializer_range
        if name.endswith("bias"):
            value = torch.zeros(shape)
        elif len(shape) == 1:
            value = torch.ones(shape)
        for place in own:
            place.fill(value)
    return xxhash.xxh3_128_hexdigest(f"dummy|{_DUMMY_SEED}|{config}".encode())


def _fill_from_files(path: Path, config: ModelConfig, places: _Places, progress: Progress) -> str:
    with ExitStack() as stack:
        stored = dict(sorted(_open_tensors(path, stack)))
        _check(path, config, {name: stored[name].get_slice(name) for name in stored}, places)
        digest = xxhash.xxh3_128(config.kv_identity.encode())
        for done, (name, file) in enumerate(stored.items()):
            tensor = file.get_tensor(name)
            _digest_tensor(digest, name, tensor)
            for place in places.get(name, ()):
                place.fill(tensor)
            progress("weights", (done + 1) / len(stored))
        return digest.hexdigest()


def _digest_tensor(digest: Any, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    if tensor.numel():
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _open_tensors(path: Path, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """Yields (name, open file) of every stored tensor. Raises ConfigError."""
    for file_path in _files(path):
        try:
            file = stack.enter_context(safe_open(file_path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file_path} cannot be read as safetensors: {error}") from error
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file


def _files(path: Path) -> list[Path]:
    index = path / _INDEX
    if not index.exists():
        single = path / _SINGLE
        if not single.exists():
            raise ConfigError(
                f"{path} has no weights: neither {_SINGLE} nor {_INDEX} is there "
                "(only safetensors are read; --load-format dummy runs without weights)"
            )
        return [single]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error!r}") from error
    missing = [name for name in names if not (path / name).exists()]
    if missing:
        raise ConfigError(f"{path} lacks {_some(missing)} that its {_INDEX} names")
    return [path / name for name in names]


def _check(
    path: Path,
    config: ModelConfig,
    stored: dict[str, Any],
    places: _Places,
) -> None:
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing = [name for name in places if name not in stored]
    unexpected = [
        name for name in stored if name not in places and name not in ignored and not name.endswith(_IGNORED_SUFFIXES)
    ]
    misshapen = [
        f"{name} {stored[name].get_shape()} instead of {own[0].shape}"
        for name, own in places.items()
        if name in stored and stored[name].get_shape() != own[0].shape
    ]
    complaints = [
        f"{what} {_some(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshapen", misshapen),
        )
        if names
    ]
    if complaints:
        raise ConfigError(f"weights in {path} do not fit its config.json: {'; '.join(complaints)}")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    rest = len(names) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown
