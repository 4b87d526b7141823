"""Weights of one decoder layer: their places in memory, and the parts of stored tensors that go there.

A stored tensor may fill part of a fused matrix, be quantised already, or be rounded while it is stored. A rank takes
its rows and columns only. Knows the names and shapes of a layer's tensors, but no files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from moonserve.engine.model.config import ModelConfig
from moonserve.engine.model.config.latents import LatentHeads
from moonserve.engine.model.partition import Shard
from moonserve.engine.model.weights.quantised_matrix import (
    PANEL,
    HugePages,
    QuantisedMatrix,
    QuantisedRows,
    WeightFormat,
    common_format,
    rounded,
)
from moonserve.engine.model.weights.stored_tensors import StoredTensor
from moonserve.protocol.errors import ConfigError

QUANTISED_FORMATS = {"int4": WeightFormat(4, 32), "int8": WeightFormat(8, 128)}
"""Formats of `--quantize`."""
HEAD_FORMAT = WeightFormat(8, 128)
"""Format of a quantised head, whatever the format of the layers."""

Projection = torch.Tensor | QuantisedMatrix
"""Weights [out, in] of a product."""


def plain(matrix: Projection) -> torch.Tensor:
    """Returns weights that were loaded without `keeps_integers`."""
    assert isinstance(matrix, torch.Tensor)
    return matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """Weights of a gated MLP, or of one expert."""

    gate_up: Projection  # gate rows, then up
    gate_up_bias: torch.Tensor | None
    down: Projection
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """Weights of latent attention beside those of other layers. Rows of rotated parts are in halves, as `rotate` of the
    kernels needs them. A head's rows of `keys` and `values` are followed by rows of zeros, up to whole panels."""

    query_norm: torch.Tensor | None  # [query rank], and
    queries: Projection | None  # [heads · (plain + rotary), query rank]; None: `qkv` gives queries, not their latents
    norm: torch.Tensor  # [rank]
    keys: torch.Tensor  # [heads · rows, plain]: from queries to the latents' space, `rank` rows of each head
    values: torch.Tensor  # [heads · rows, rank]: from that space to a head's values


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one decoder layer; matrices are [out, in]."""

    input_norm: torch.Tensor
    qkv: Projection  # q rows, then k, then v; or of queries or their latents, then of latents, then of the rotated key
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]: norms of q and k, repeated per head
    o: Projection
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    sinks: torch.Tensor | None  # [heads] float32
    router: torch.Tensor | None  # [experts, hidden]; None: the layer has one MLP
    router_bias: torch.Tensor | None
    mlps: Sequence[MlpWeights]  # of each expert
    corrections: torch.Tensor | None = None  # [experts] float32: added to the router's scores for the choice
    shared: MlpWeights | None = None  # used by every token beside experts
    latents: LatentWeights | None = None

    @property
    def projections(self) -> Iterator[Projection]:
        yield from (self.qkv, self.o)
        if self.latents is not None:
            yield from (self.latents.keys, self.latents.values)
            if self.latents.queries is not None:
                yield self.latents.queries
        for mlp in (*self.mlps, *([] if self.shared is None else [self.shared])):
            yield from (mlp.gate_up, mlp.down)


@dataclass(frozen=True, slots=True)
class Destination:
    """Destination of a stored tensor of `shape`, or of a part of it."""

    own: Projection
    shape: list[int]
    part: tuple[slice | int, ...] = ()
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
        assert isinstance(rows, slice)
        assert isinstance(columns, slice)
        part = stored.part(rows, columns)
        if isinstance(self.own, QuantisedMatrix):
            self.own.store(self.first, part)
        elif not self.own.is_meta:
            for start, some in part.chunks():
                self.own[start : start + len(some.codes)] = some.dequantised()


Places = dict[str, list[Destination]]


@dataclass(frozen=True, slots=True)
class Storage:
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
        return stored or (HEAD_FORMAT if self.quantise in QUANTISED_FORMATS else None)

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
        return "" if format is None else f"|{format}|{HEAD_FORMAT}"


def _rows_of(matrix: Projection, first: int, count: int) -> Projection:
    """Returns the rows of a plain matrix, or the whole quantised one, which is filled by row numbers."""
    return matrix if isinstance(matrix, QuantisedMatrix) else matrix[first : first + count]


@dataclass(frozen=True, slots=True)
class _Part:
    """Range of one dimension of a stored tensor that is loaded."""

    size: int
    own: range

    @property
    def slice(self) -> slice:
        return slice(self.own.start, self.own.stop)


def allocate_layer(config: ModelConfig, storage: Storage, layer: int, places: Places, shard: Shard) -> LayerWeights:
    def vector(name: str, *shape: int) -> torch.Tensor:
        tensor = storage.vector(*shape)
        places[f"model.layers.{layer}.{name}"] = [Destination(tensor, list(shape))]
        return tensor

    def require_whole_groups(format: WeightFormat | None, columns: _Part, name: str) -> None:
        if format is not None and any(
            end % format.group for end in (columns.own.start, columns.own.stop % columns.size)
        ):
            raise ConfigError(
                f"groups of {format.group} weights do not divide the {len(columns.own)} columns of {name} that each of "
                f"{shard.size} ranks has: choose fewer ranks"
            )

    def cut(name: str, outputs: int, columns: _Part) -> Projection:
        format = storage.format_of(f"model.layers.{layer}.{name}")
        require_whole_groups(format, columns, name)
        matrix = storage.matrix(outputs, len(columns.own), format)
        part = (slice(None), columns.slice)
        places[f"model.layers.{layer}.{name}"] = [Destination(matrix, [outputs, columns.size], part, format=format)]
        return matrix

    def fused_bias(module: str, names: Sequence[str], rows: Sequence[_Part]) -> torch.Tensor:
        sizes = [len(part.own) for part in rows]
        tensor = storage.vector(sum(sizes))
        for name, part, view in zip(names, rows, torch.split(tensor, sizes), strict=True):
            places[f"model.layers.{layer}.{module}.{name}.bias"] = [Destination(view, [part.size], (part.slice,))]
        return tensor

    def fused(
        module: str, names: Sequence[str], rows: Sequence[_Part], inputs: int, *, pairs: bool = False
    ) -> Projection:
        sizes = [len(part.own) for part in rows]
        format = storage.format_of(*(f"model.layers.{layer}.{module}.{name}.weight" for name in names))
        matrix = storage.matrix(sum(sizes), inputs, format, pairs=pairs)
        for name, part, first in zip(names, rows, (0, *accumulate(sizes)), strict=False):
            own = _rows_of(matrix, first, len(part.own))
            place = Destination(own, [part.size, inputs], (part.slice,), first, format)
            places[f"model.layers.{layer}.{module}.{name}.weight"] = [place]
        return matrix

    def once(bias: torch.Tensor) -> torch.Tensor | None:
        # The product is summed over ranks, so only one of them may add the bias.
        return bias if shard.is_first else None

    hidden, inner = config.hidden_size, _Part(config.intermediate_size, shard.inner)
    latents = config.latent_heads
    q_rows = _of_heads(config.num_heads, config.head_dim if latents is None else latents.value, shard.heads)
    kv_rows = _of_heads(config.num_kv_heads, config.head_dim, shard.kv_heads)
    qkv_names = ("self_attn", ("q_proj", "k_proj", "v_proj"))

    def mlp(module: str, gate: str, up: str, down: str, size: int | None = None) -> MlpWeights:
        own = inner if size is None else _Part(size, range(size))
        return MlpWeights(
            gate_up=fused(module, (gate, up), (own, own), hidden, pairs=True),
            gate_up_bias=fused_bias(module, (gate, up), (own, own)) if config.mlp_bias else None,
            down=cut(f"{module}.{down}.weight", hidden, own),
            down_bias=once(vector(f"{module}.{down}.bias", hidden)) if config.mlp_bias else None,
        )

    def stacked(module: str, count: int) -> list[MlpWeights]:
        """Allocates experts that are one matrix in the checkpoint: of the first one gates and ups by turns, then of the
        second one."""
        size, own = inner.size, len(inner.own)
        name = f"model.layers.{layer}.{module}"
        gate_up_format, down_format = (storage.format_of(f"{name}.{each}") for each in ("gate_up_proj", "down_proj"))
        require_whole_groups(down_format, inner, "down_proj")
        mlps = []

        def place(
            own: Projection,
            tensor: str,
            shape: list[int],
            *part: slice | int,
            first: int = 0,
            format: WeightFormat | None = None,
        ) -> None:
            places.setdefault(f"{name}.{tensor}", []).append(Destination(own, shape, part, first, format))

        for expert in range(count):
            gate_up = storage.matrix(2 * own, hidden, gate_up_format, pairs=True)
            down = storage.matrix(hidden, own, down_format)
            gate_up_bias, down_bias = storage.vector(2 * own), storage.vector(hidden)
            for parity, first in ((0, 0), (1, own)):
                rows = slice(2 * (expert * size + inner.own.start) + parity, 2 * (expert * size + inner.own.stop), 2)
                some = _rows_of(gate_up, first, own)
                place(some, "gate_up_proj", [2 * count * size, hidden], rows, first=first, format=gate_up_format)
                columns = slice(2 * inner.own.start + parity, 2 * inner.own.stop, 2)
                place(gate_up_bias[first : first + own], "gate_up_proj_bias", [count, 2 * size], expert, columns)
            rows = slice(expert * hidden, (expert + 1) * hidden)
            place(down, "down_proj", [count * hidden, size], rows, inner.slice, format=down_format)
            place(down_bias, "down_proj_bias", [count, hidden], expert)
            mlps.append(MlpWeights(gate_up=gate_up, gate_up_bias=gate_up_bias, down=down, down_bias=once(down_bias)))
        return mlps

    experts = config.experts
    router, router_bias, corrections, shared = None, None, None, None
    if experts is not None and layer < experts.dense_layers:
        mlps = [mlp("mlp", *experts.projections, experts.dense_size)]
    elif experts is None:
        mlps = [mlp("mlp", "gate_proj", "up_proj", "down_proj")]
    elif experts.clamped is not None:
        mlps = stacked(f"{experts.module}.experts", experts.count)
        router = vector(f"{experts.module}.router.weight", experts.count, hidden)
        router_bias = vector(f"{experts.module}.router.bias", experts.count)
    else:
        mlps = [mlp(f"{experts.module}.experts.{number}", *experts.projections) for number in range(experts.count)]
        router = vector(f"{experts.module}.gate.weight", experts.count, hidden)
        if experts.shared_size:
            shared = mlp(f"{experts.module}.shared_experts", *experts.projections, experts.shared_size)
        if experts.router is not None and experts.router.has_corrections:
            corrections = torch.empty(experts.count)
            name = f"model.layers.{layer}.{experts.module}.gate.e_score_correction_bias"
            places[name] = [Destination(corrections, [experts.count])]
    if latents is None:
        qkv, latent_weights = fused(*qkv_names, (q_rows, kv_rows, kv_rows), hidden), None
    else:
        qkv, latent_weights = _allocate_latents(config, latents, storage, layer, places)
    return LayerWeights(
        input_norm=vector("input_layernorm.weight", hidden),
        qkv=qkv,
        qkv_bias=fused_bias(*qkv_names, (q_rows, kv_rows, kv_rows)) if config.qkv_bias else None,
        qk_norm=_allocate_qk_norm(config, storage.dtype, layer, places, shard) if config.qk_norm else None,
        o=cut("self_attn.o_proj.weight", hidden, q_rows),
        o_bias=once(vector("self_attn.o_proj.bias", hidden)) if config.o_bias else None,
        post_norm=vector("post_attention_layernorm.weight", hidden),
        sinks=_allocate_sinks(config, layer, places, shard) if config.attention_sinks else None,
        router=router,
        router_bias=router_bias,
        mlps=mlps,
        corrections=corrections,
        shared=shared,
        latents=latent_weights,
    )


def _allocate_latents(
    config: ModelConfig, latents: LatentHeads, storage: Storage, layer: int, places: Places
) -> tuple[Projection, LatentWeights]:
    """Returns `qkv` and the other weights of latent attention."""
    heads, hidden, rank, plain = config.num_heads, config.hidden_size, latents.rank, latents.plain
    module, width = f"model.layers.{layer}.self_attn", plain + latents.rotary

    def norm(name: str, size: int) -> torch.Tensor:
        tensor = storage.vector(size)
        places[f"{module}.{name}.weight"] = [Destination(tensor, [size])]
        return tensor

    def halves(start: int) -> list[range]:
        end = start + latents.rotary
        return [range(start, end, 2), range(start + 1, end, 2)] if latents.is_interleaved else [range(start, end)]

    def in_order(inputs: int, *sources: tuple[str, Sequence[range]]) -> Projection:
        """Returns a matrix of the given rows of stored ones."""
        names = [f"{module}.{name}.weight" for name, _rows in sources]
        format = storage.format_of(*names)
        counts = [sum(map(len, rows)) for _name, rows in sources]
        matrix, first = storage.matrix(sum(counts), inputs, format), 0
        for name, (_, rows), count in zip(names, sources, counts, strict=True):
            places[name] = []
            for part in rows:
                own, chosen = _rows_of(matrix, first, len(part)), (slice(part.start, part.stop, part.step),)
                places[name].append(Destination(own, [count, inputs], chosen, first, format))
                first += len(part)
        return matrix

    starts = range(0, heads * width, width)
    by_head = [part for start in starts for part in (range(start, start + plain), *halves(start + plain))]
    pooled = ("kv_a_proj_with_mqa", [range(rank), *halves(rank)])
    query_norm, queries = None, None
    if latents.query_rank is None:
        qkv = in_order(hidden, ("q_proj", by_head), pooled)
    else:
        qkv = in_order(hidden, ("q_a_proj", [range(latents.query_rank)]), pooled)
        query_norm = norm("q_a_layernorm", latents.query_rank)
        queries = in_order(latents.query_rank, ("q_b_proj", by_head))
    keys, values = (
        torch.zeros(heads, -(-outputs // PANEL) * PANEL, inputs, dtype=storage.dtype)
        for outputs, inputs in ((rank, plain), (latents.value, rank))
    )
    shape = [heads * (plain + latents.value), rank]
    expanded = places[f"{module}.kv_b_proj.weight"] = []
    for head, start in enumerate(range(0, shape[0], plain + latents.value)):
        middle, end = start + plain, start + plain + latents.value
        expanded.append(Destination(keys[head, :rank].mT, shape, (slice(start, middle),)))
        expanded.append(Destination(values[head, : latents.value], shape, (slice(middle, end),)))
    return qkv, LatentWeights(
        query_norm=query_norm,
        queries=queries,
        norm=norm("kv_a_layernorm", rank),
        keys=keys.flatten(0, 1),
        values=values.flatten(0, 1),
    )


def _of_heads(count: int, dim: int, own: range) -> _Part:
    """Returns the rows of heads `own` in a projection to `count` heads."""
    return _Part(count * dim, range(own.start * dim, own.stop * dim))


def _allocate_sinks(config: ModelConfig, layer: int, places: Places, shard: Shard) -> torch.Tensor:
    tensor = torch.empty(len(shard.heads))
    part = slice(shard.heads.start, shard.heads.stop)
    places[f"model.layers.{layer}.self_attn.sinks"] = [Destination(tensor, [config.num_heads], (part,))]
    return tensor


def _allocate_qk_norm(
    config: ModelConfig, dtype: torch.dtype, layer: int, places: Places, shard: Shard
) -> torch.Tensor:
    tensor = torch.empty(len(shard.heads) + len(shard.kv_heads), config.head_dim, dtype=dtype)
    rows = [Destination(row, [config.head_dim]) for row in tensor.unbind(0)]
    places[f"model.layers.{layer}.self_attn.q_norm.weight"] = rows[: len(shard.heads)]
    places[f"model.layers.{layer}.self_attn.k_norm.weight"] = rows[len(shard.heads) :]
    return tensor
