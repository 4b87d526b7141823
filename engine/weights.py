"""Reading a checkpoint: safetensors files, sharded or not, into the fused matrices that the forward pass wants.

Owns tensor names, shapes and the digest of the stored bytes and of how KV comes of them. Everything is checked against
the files' headers before anything is read, so that a wrong folder is refused at once and with a list. Does not know how
weights are used.
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

from engine.config import ModelConfig
from engine.stage import Stage, split
from protocol.errors import ConfigError

LOAD_FORMATS = ("auto", "dummy")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAMES_SHOWN = 5
_DUMMY_SEED = 0
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # computed, stored by old exporters

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer; matrices are [out, in]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor  # q rows, then k, then v
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]: of q and k, repeated per head
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor  # gate rows, then up
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model, or one stage's share of it. With tied embeddings a whole model's `lm_head` is `embedding`."""

    embedding: torch.Tensor  # [vocab, hidden]; no rows where the first stage is another one
    layers: Sequence[LayerWeights]  # the stage's
    norm: torch.Tensor
    lm_head: torch.Tensor  # [vocab, hidden]; no rows where the last stage is another one
    # Of all stored tensors, whatever the share: names, dtypes, shapes and bytes; and of `kv_identity`.
    digest: str


_Places = dict[str, list[torch.Tensor]]
"""Where each stored tensor goes, by its name."""


def load_weights(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    load_format: str = "auto",
    progress: Progress | None = None,
    device: torch.device | None = None,
    stage: Stage | None = None,
) -> Weights:
    """The model's weights, or those of one stage, in `dtype` on `device`, the CPU when None. Raises ConfigError listing
    what is missing, unexpected or misshapen."""
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    with device or torch.device("cpu"):
        places, build = _allocate(config, dtype, stage or split(config.num_layers, 1)[0])
    if load_format == "dummy":
        return build(_fill_randomly(config, places))
    return build(_fill_from_files(path, config, places, progress or (lambda _stage, _done: None)))


# -- where each stored tensor goes


def _allocate(
    config: ModelConfig, dtype: torch.dtype, stage: Stage
) -> tuple[_Places, Callable[[str], Weights]]:
    """Empty weights; the views of them that each stored tensor fills, by its name; and what completes them. What other
    stages have is read like the rest, for the digest, into tensors without memory."""
    places: _Places = {}

    def vocabulary(name: str, is_own: bool) -> torch.Tensor:
        with _elsewhere(not is_own):
            tensor = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        places[name] = [tensor]
        return tensor if is_own else torch.empty(0, config.hidden_size, dtype=dtype)

    tied = config.tie_word_embeddings
    embedding = vocabulary("model.embed_tokens.weight", stage.is_first or (tied and stage.is_last))
    layers = []
    for layer in range(config.num_layers):
        with _elsewhere(layer not in stage.layers):
            layers.append(_allocate_layer(config, dtype, layer, places))
    norm = torch.empty(config.hidden_size, dtype=dtype)
    places["model.norm.weight"] = [norm]
    lm_head = embedding if tied else vocabulary("lm_head.weight", stage.is_last)

    def build(digest: str) -> Weights:
        return Weights(
            embedding=embedding if stage.is_first else embedding[:0],
            layers=layers[stage.layers.start : stage.layers.stop],
            norm=norm,
            lm_head=lm_head if stage.is_last else lm_head[:0],
            digest=digest,
        )

    return places, build


def _elsewhere(is_so: bool) -> AbstractContextManager[object]:
    """What is allocated within has no memory if `is_so`."""
    return torch.device("meta") if is_so else nullcontext()


def _allocate_layer(
    config: ModelConfig, dtype: torch.dtype, layer: int, places: _Places
) -> LayerWeights:
    prefix = f"model.layers.{layer}"

    def plain(name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        places[f"{prefix}.{name}"] = [tensor]
        return tensor

    def fused(
        module: str, names: Sequence[str], kind: str, rows: list[int], *columns: int
    ) -> torch.Tensor:
        tensor = torch.empty((sum(rows), *columns), dtype=dtype)
        for name, view in zip(names, torch.split(tensor, rows), strict=True):
            places[f"{prefix}.{module}.{name}.{kind}"] = [view]
        return tensor

    def qk_norm() -> torch.Tensor:
        tensor = torch.empty(config.num_heads + config.num_kv_heads, config.head_dim, dtype=dtype)
        rows = list(tensor.unbind(0))
        places[f"{prefix}.self_attn.q_norm.weight"] = rows[: config.num_heads]
        places[f"{prefix}.self_attn.k_norm.weight"] = rows[config.num_heads :]
        return tensor

    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = ("self_attn", ("q_proj", "k_proj", "v_proj"))
    qkv_rows = [q_rows, kv_rows, kv_rows]
    gate_up = ("mlp", ("gate_proj", "up_proj"))
    return LayerWeights(
        input_norm=plain("input_layernorm.weight", hidden),
        qkv=fused(*qkv, "weight", qkv_rows, hidden),
        qkv_bias=fused(*qkv, "bias", qkv_rows) if config.qkv_bias else None,
        qk_norm=qk_norm() if config.qk_norm else None,
        o=plain("self_attn.o_proj.weight", hidden, q_rows),
        o_bias=plain("self_attn.o_proj.bias", hidden) if config.o_bias else None,
        post_norm=plain("post_attention_layernorm.weight", hidden),
        gate_up=fused(*gate_up, "weight", [inner, inner], hidden),
        gate_up_bias=fused(*gate_up, "bias", [inner, inner]) if config.mlp_bias else None,
        down=plain("mlp.down_proj.weight", hidden, inner),
        down_bias=plain("mlp.down_proj.bias", hidden) if config.mlp_bias else None,
    )


# -- filling


def _fill_randomly(config: ModelConfig, places: _Places) -> str:
    """Normal matrices, norms of one, no bias; the same on every machine for the same configuration."""
    generator = torch.Generator().manual_seed(_DUMMY_SEED)
    for name, own in places.items():
        shape = own[0].shape
        value = torch.randn(shape, generator=generator) * config.initializer_range
        if name.endswith("bias"):
            value = torch.zeros(shape)
        elif len(shape) == 1:
            value = torch.ones(shape)
        for place in own:
            place.copy_(value)
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
                place.copy_(tensor)
            progress("weights", (done + 1) / len(stored))
        return digest.hexdigest()


def _digest_tensor(digest: Any, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    if tensor.numel():
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _open_tensors(path: Path, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """(name, open file) of every stored tensor."""
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
        name
        for name in stored
        if name not in places and name not in ignored and not name.endswith(_IGNORED_SUFFIXES)
    ]
    misshapen = [
        f"{name} {stored[name].get_shape()} instead of {list(own[0].shape)}"
        for name, own in places.items()
        if name in stored and stored[name].get_shape() != list(own[0].shape)
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
