"""Loads a checkpoint from safetensors files or a GGUF file into the fused matrices of the forward pass.

Owns tensor names and shapes, and the digest of the stored bytes and of the configuration that determines KV. Names and
shapes are checked against the file headers before any tensor is read, so a wrong folder is refused at once with a list
of problems. Weights may be quantised in the checkpoint (`stored_tensors`) or while they are loaded, tensor by tensor
(`quantised_matrix`). Does not know how weights are used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from moonserve.engine.model.config import ModelConfig
from moonserve.engine.model.partition import Shard, Stage, split_into_shards, split_into_stages
from moonserve.engine.model.weights.checkpoint_files import check_shapes, open_tensors
from moonserve.engine.model.weights.layer_weights import (
    QUANTISED_FORMATS,
    Destination,
    LayerWeights,
    Places,
    Projection,
    Storage,
    allocate_layer,
)
from moonserve.engine.model.weights.quantised_matrix import HugePages, QuantisedMatrix
from moonserve.engine.model.weights.stored_tensors import StoredTensor, stored_tensors
from moonserve.protocol.errors import ConfigError

LOAD_FORMATS = ("auto", "dummy")
_DUMMY_SEED = 0

Progress = Callable[[str, float], None]
"""Progress callback: name of the current activity and the fraction done."""


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
        return any(isinstance(matrix, QuantisedMatrix) for matrix in self.projections)

    @property
    def sinks(self) -> tuple[torch.Tensor, ...]:
        """Attention sinks of the layers, [heads] float32 each; empty: there are none."""
        return tuple(layer.sinks for layer in self.layers if layer.sinks is not None)

    @property
    def projections(self) -> Iterator[Projection]:
        for layer in self.layers:
            yield from layer.projections
        yield self.lm_head


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
        storage = Storage(dtype, quantise, memory, stored)
        with device or torch.device("cpu"):
            places, build = _allocate(config, storage, stage, shard or split_into_shards(config, 1)[0])
        if load_format == "dummy":
            digest = _fill_randomly(config, places)
        else:
            given = {name: source.shape for name, source in stored.items()}
            optional = {"lm_head.weight"} if config.tie_word_embeddings else set()
            if config.latent_heads is not None:  # a layer that predicts one token more (V3)
                optional |= {name for name in given if name.startswith(f"model.layers.{config.num_layers}.")}
            check_shapes(path, {name: own[0].shape for name, own in places.items()}, given, optional)
            digest = _fill_from_files(config, files, stored, places, progress or (lambda _stage, _done: None))
    return build(xxhash.xxh3_128_hexdigest(f"{digest}{storage.identity}".encode()) if storage.identity else digest)


# -- destinations of stored tensors


def _allocate(
    config: ModelConfig, storage: Storage, stage: Stage | None, shard: Shard
) -> tuple[Places, Callable[[str], Weights]]:
    """Allocates empty weights. Returns the destinations of each stored tensor by name, and a function from the digest
    to the weights. Tensors of other stages are also read, for the digest, into tensors without memory."""
    places: Places = {}
    whole = stage or split_into_stages(config.num_layers, 1)[0]

    size, tokens, hidden = config.vocab_size, shard.vocabulary, config.hidden_size
    tied = config.tie_word_embeddings
    head_name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    head_format = storage.head_format(head_name)
    shares_rows = tied and head_format is None
    with _elsewhere(not (whole.is_first or (shares_rows and whole.is_last))):
        embedding = storage.vector(size, hidden)
    places["model.embed_tokens.weight"] = [Destination(embedding, [size, hidden])]
    layers = []
    for layer in range(config.num_layers):
        with _elsewhere(layer not in whole.layers):
            layers.append(allocate_layer(config, storage, layer, places, shard))
    norm = storage.vector(hidden)
    places["model.norm.weight"] = [Destination(norm, list(norm.shape))]
    lm_head: Projection
    if shares_rows:
        lm_head = embedding if shard.size == 1 else embedding[tokens.start : tokens.stop]
    else:
        with _elsewhere(not whole.is_last):
            lm_head = storage.matrix(len(tokens), hidden, head_format)
        part = (slice(tokens.start, tokens.stop),)
        places.setdefault(head_name, []).append(Destination(lm_head, [size, hidden], part, format=head_format))

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


# -- filling


def _fill_randomly(config: ModelConfig, places: Places) -> str:
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
    places: Places,
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
