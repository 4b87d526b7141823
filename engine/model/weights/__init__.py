"""Loads a checkpoint from safetensors files or a GGUF file into the fused matrices of the forward pass.

Owns tensor names and shapes, and the digest of the stored bytes and of the configuration that determines KV. Names and
shapes are checked against the file headers before any tensor is read, so a wrong folder is refused at once with a list
of problems. Weights may be quantised in the checkpoint (`stored_tensors`) or while they are loaded, tensor by tensor
(`quantised_matrix`). Does not know how weights are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
import xxhash

from moonserve.engine.model.config import ModelConfig
from moonserve.engine.model.partition import Shard, Stage, split_into_shards, split_into_stages
from moonserve.engine.model.weights.checkpoint_files import check_shapes, open_tensors
from moonserve.engine.model.weights.quantised_matrix import (
    HugePages,
    QuantisedMatrix,
    QuantisedRows,
    WeightFormat,
    common_format,
    rounded,
)
from moonserve.engine.model.weights.stored_tensors import StoredTensor, stored_tensors
from moonserve.protocol.errors import ConfigError

LOAD_FORMATS = ("auto", "dummy")
_DUMMY_SEED = 0

QUANTISED_FORMATS = {"int4": WeightFormat(4, 32), "int8": WeightFormat(8, 128)}
"""Formats of `--quantize`."""
_HEAD_FORMAT = WeightFormat(8, 128)
"""Format of a quantised head, whatever the format of the layers."""

Projection = torch.Tensor | QuantisedMatrix
"""Weights [out, in] of a product."""


def plain(matrix: Projection) -> torch.Tensor:
    """Returns weights that were loaded without `keeps_integers`."""
    assert isinstance(matrix, torch.Tensor)
    return matrix


Progress = Callable[[str, float], None]
"""Progress callback: name of the current activity and the fraction done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one decoder layer; matrices are [out, in]."""

    input_norm: torch.Tensor
    qkv: Projection  # q rows, then k, then v
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]: norms of q and k, repeated per head
    o: Projection
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: Projection  # gate rows, then up
    gate_up_bias: torch.Tensor | None
    down: Projection
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of a model, or of one stage or rank. With tied embeddings, the `lm_head` of a whole model is `embedding`
    unless it is quantised."""

    embedding: torch.Tensor  # [vocab, hidden]; no rows except at the first stage
    layers: Sequence[LayerWeights]  # of the stage
    norm: torch.Tensor
    lm_head: Projection  # [vocab, hidden], a rank has its rows only; no rows except at the last stage
    # Hash of `kv_identity`, all stored tensors (names, dtypes, shapes, bytes) and the format to which they were rounded
    # while loading, whatever the share.
    digest: str

    @property
    def is_quantised(self) -> bool:
        layers = ((one.qkv, one.o, one.gate_up, one.down) for one in self.layers)
        return any(isinstance(matrix, QuantisedMatrix) for matrix in (self.lm_head, *chain.from_iterable(layers)))


@dataclass(frozen=True, slots=True)
class _Destination:
    """Destination of a stored tensor of `shape`, or of a part of it."""

    own: Projection
    shape: list[int]
    part: tuple[slice, ...] = ()
    first: int = 0  # row of a quantised matrix
    format: WeightFormat | None = None  # to which weights are rounded

    def fill(self, stored: torch.Tensor | QuantisedRows) -> None:
        if isinstance(stored, QuantisedRows):
            self._fill_from_codes(stored)
            return
        part = stored[self.part]
        if isinstance(self.own, QuantisedMatrix):
            self.own.round_and_store(self.first, part)
        elif not self.own.is_meta:  # of another stage
            self.own.copy_(part if self.format is None else rounded(part, self.format))

    def _fill_from_codes(self, stored: QuantisedRows) -> None:
        rows, columns = (*self.part, slice(None), slice(None))[:2]
        part = stored.part(rows, columns)
        if isinstance(self.own, QuantisedMatrix):
            self.own.store(self.first, part)
        elif not self.own.is_meta:
            for start, some in part.chunks():
                self.own[start : start + len(some.codes)] = some.dequantised()


_Places = dict[str, list[_Destination]]


@dataclass(frozen=True, slots=True)
class _Storage:
    """Format of a model's weights in memory."""

    dtype: torch.dtype
    quantise: str  # a `--quantize` value
    memory: HugePages | None  # of quantised matrices; None: their weights are rounded and then kept in `dtype`
    stored: Mapping[str, StoredTensor]  # of the checkpoint

    def format_of(self, *names: str) -> WeightFormat | None:
        """Returns the format of a matrix in memory; a fused one is plain unless one format holds all its parts."""
        found = [self.stored[name].format if name in self.stored else None for name in names]
        return common_format(found) or QUANTISED_FORMATS.get(self.quantise)

    def head_format(self, name: str) -> WeightFormat | None:
        stored = self.stored[name].format if name in self.stored else None
        return stored or (_HEAD_FORMAT if self.quantise in QUANTISED_FORMATS else None)

    def vector(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype)

    def matrix(self, outputs: int, inputs: int, format: WeightFormat | None, *, pairs: bool = False) -> Projection:
        if format is None or self.memory is None:
            return torch.empty(outputs, inputs, dtype=self.dtype)
        return QuantisedMatrix(outputs, inputs, format, self.memory, pairs=pairs)

    @property
    def identity(self) -> str:
        """Everything about the rounding that KV depends on; empty if there is none."""
        format = QUANTISED_FORMATS.get(self.quantise)
        return "" if format is None else f"|{format}|{_HEAD_FORMAT}"


def _rows_of(matrix: Projection, first: int, count: int) -> Projection:
    """Returns the rows of a plain matrix, or the whole quantised one, which is filled by row numbers."""
    return matrix if isinstance(matrix, QuantisedMatrix) else matrix[first : first + count]


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
    quantise: str = "auto",
    keeps_integers: bool = False,
) -> Weights:
    """Loads the weights of the model, or of one stage or rank, in `dtype` on `device` (None = CPU). Raises ConfigError
    that lists missing, unexpected and misshapen tensors. `quantise`: a `--quantize` value. `keeps_integers`: each
    quantised matrix is a `QuantisedMatrix`; otherwise its rounded weights are in `dtype`."""
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    if quantise not in ("auto", *QUANTISED_FORMATS):
        raise ConfigError(f"weights in {quantise!r} are not one of auto, {', '.join(QUANTISED_FORMATS)}")
    checkpoint = config.quantised
    if quantise != "auto" and checkpoint is not None and not checkpoint.is_float:
        raise ConfigError(f"--quantize {quantise}: the weights are quantised by {checkpoint.method} already")
    memory = HugePages() if keeps_integers else None
    with ExitStack() as stack:
        files = dict(sorted(open_tensors(path, stack, checkpoint))) if load_format == "auto" else {}
        headers = {name: file.get_slice(name) for name, file in files.items()}
        shapes = {name: header.get_shape() for name, header in headers.items()}
        stored = stored_tensors(shapes, {name: header.get_dtype() for name, header in headers.items()}, checkpoint)
        storage = _Storage(dtype, quantise, memory, stored)
        with device or torch.device("cpu"):
            places, build = _allocate(config, storage, stage, shard or split_into_shards(config, 1)[0])
        if load_format == "dummy":
            digest = _fill_randomly(config, places)
        else:
            given = {name: source.shape for name, source in stored.items()}
            optional = {"lm_head.weight"} if config.tie_word_embeddings else set()
            check_shapes(path, {name: own[0].shape for name, own in places.items()}, given, optional)
            digest = _fill_from_files(config, files, stored, places, progress or (lambda _stage, _done: None))
    return build(xxhash.xxh3_128_hexdigest(f"{digest}{storage.identity}".encode()) if storage.identity else digest)


# -- destinations of stored tensors


def _allocate(
    config: ModelConfig, storage: _Storage, stage: Stage | None, shard: Shard
) -> tuple[_Places, Callable[[str], Weights]]:
    """Allocates empty weights. Returns the destinations of each stored tensor by name, and a function from the digest
    to the weights. Tensors of other stages are also read, for the digest, into tensors without memory."""
    places: _Places = {}
    whole = stage or split_into_stages(config.num_layers, 1)[0]

    size, tokens, hidden = config.vocab_size, shard.vocabulary, config.hidden_size
    tied = config.tie_word_embeddings
    head_name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    head_format = storage.head_format(head_name)
    shares_rows = tied and head_format is None
    with _elsewhere(not (whole.is_first or (shares_rows and whole.is_last))):
        embedding = storage.vector(size, hidden)
    places["model.embed_tokens.weight"] = [_Destination(embedding, [size, hidden])]
    layers = []
    for layer in range(config.num_layers):
        with _elsewhere(layer not in whole.layers):
            layers.append(_allocate_layer(config, storage, layer, places, shard))
    norm = storage.vector(hidden)
    places["model.norm.weight"] = [_Destination(norm, list(norm.shape))]
    lm_head: Projection
    if shares_rows:
        lm_head = embedding if shard.size == 1 else embedding[tokens.start : tokens.stop]
    else:
        with _elsewhere(not whole.is_last):
            lm_head = storage.matrix(len(tokens), hidden, head_format)
        part = (slice(tokens.start, tokens.stop),)
        places.setdefault(head_name, []).append(_Destination(lm_head, [size, hidden], part, format=head_format))

    def build(digest: str) -> Weights:
        nothing = torch.empty(0, hidden, dtype=storage.dtype)
        return Weights(
            embedding=embedding if whole.is_first else nothing,
            layers=layers[whole.layers.start : whole.layers.stop],
            norm=norm,
            lm_head=lm_head if whole.is_last else nothing,
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


def _allocate_layer(config: ModelConfig, storage: _Storage, layer: int, places: _Places, shard: Shard) -> LayerWeights:
    def vector(name: str, size: int) -> torch.Tensor:
        tensor = storage.vector(size)
        places[f"model.layers.{layer}.{name}"] = [_Destination(tensor, [size])]
        return tensor

    def cut(name: str, outputs: int, columns: _Part) -> Projection:
        format = storage.format_of(f"model.layers.{layer}.{name}")
        if format is not None and any(
            end % format.group for end in (columns.own.start, columns.own.stop % columns.size)
        ):
            raise ConfigError(
                f"groups of {format.group} weights do not divide the {len(columns.own)} columns of {name} that each of "
                f"{shard.size} ranks has: choose fewer ranks"
            )
        matrix = storage.matrix(outputs, len(columns.own), format)
        part = (slice(None), columns.slice)
        places[f"model.layers.{layer}.{name}"] = [_Destination(matrix, [outputs, columns.size], part, format=format)]
        return matrix

    def fused_bias(module: str, names: Sequence[str], rows: Sequence[_Part]) -> torch.Tensor:
        sizes = [len(part.own) for part in rows]
        tensor = storage.vector(sum(sizes))
        for name, part, view in zip(names, rows, torch.split(tensor, sizes), strict=True):
            places[f"model.layers.{layer}.{module}.{name}.bias"] = [_Destination(view, [part.size], (part.slice,))]
        return tensor

    def fused(module: str, names: Sequence[str], rows: Sequence[_Part], inputs: int) -> Projection:
        sizes = [len(part.own) for part in rows]
        format = storage.format_of(*(f"model.layers.{layer}.{module}.{name}.weight" for name in names))
        matrix = storage.matrix(sum(sizes), inputs, format, pairs=module == "mlp")
        for name, part, first in zip(names, rows, (0, *accumulate(sizes)), strict=False):
            own = _rows_of(matrix, first, len(part.own))
            place = _Destination(own, [part.size, inputs], (part.slice,), first, format)
            places[f"model.layers.{layer}.{module}.{name}.weight"] = [place]
        return matrix

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
        input_norm=vector("input_layernorm.weight", hidden),
        qkv=fused(*qkv, qkv_rows, hidden),
        qkv_bias=fused_bias(*qkv, qkv_rows) if config.qkv_bias else None,
        qk_norm=_allocate_qk_norm(config, storage.dtype, layer, places, shard) if config.qk_norm else None,
        o=cut("self_attn.o_proj.weight", hidden, q_rows),
        o_bias=once(vector("self_attn.o_proj.bias", hidden)) if config.o_bias else None,
        post_norm=vector("post_attention_layernorm.weight", hidden),
        gate_up=fused(*gate_up, (inner, inner), hidden),
        gate_up_bias=fused_bias(*gate_up, (inner, inner)) if config.mlp_bias else None,
        down=cut("mlp.down_proj.weight", hidden, inner),
        down_bias=once(vector("mlp.down_proj.bias", hidden)) if config.mlp_bias else None,
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


def _fill_from_files(
    config: ModelConfig,
    files: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    places: _Places,
    progress: Progress,
) -> str:
    digest = xxhash.xxh3_128(config.kv_identity.encode())
    for done, (name, source) in enumerate(stored.items()):
        parts = {part: files[each].get_tensor(each) for part, each in source.names.items()}
        for part, each in source.names.items():
            _digest_tensor(digest, each, parts[part])
        if name in places:
            decoded = source.decode(parts)
            for place in places[name]:
                place.fill(decoded)
        progress("weights", (done + 1) / len(stored))
    return digest.hexdigest()


def _digest_tensor(digest: Any, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
    if tensor.numel():
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
