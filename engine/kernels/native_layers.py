"""Kernels for CPUs in C++ (`engine/kernels/native/layers.cpp`): two calls per layer, whatever the number of rows.

Weights are stored once, in the layout of the products. Owns the memory that the calls read and write. Results equal
those of `torch_kernels` except for the order of sums.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moonserve.engine.kernels import AllReduce, Heads, Step
from moonserve.engine.kernels.native_library import CLayer, CMatrix, CMlp, CModel, CStep, LayersLibrary, ThreadPool
from moonserve.engine.kernels.rope import RopeTable
from moonserve.engine.kernels.shared_cores import SharedCores
from moonserve.engine.kernels.weight_packing import Arena, Compactor, Matrix, pack, pack_gates, packed_bytes
from moonserve.engine.kv_cache.tensors import KvTensors
from moonserve.engine.model.config import ModelConfig
from moonserve.engine.model.config.experts import Experts
from moonserve.engine.model.config.latents import LatentHeads
from moonserve.engine.model.weights import Weights
from moonserve.engine.model.weights.layer_weights import LayerWeights, MlpWeights, Projection
from moonserve.engine.model.weights.quantised_matrix import LANES, QuantisedMatrix
from moonserve.protocol.process.native_libraries import CompilerError

_GROUP_ROWS = 256  # GROUP of tile_product.h
_MOST_EXPERTS, _MOST_EXPERTS_PER_TOKEN = 1024, 64  # of router.h
_WORD_BYTES = 4
_QUANTISED_FORMATS = {"int8": 1, "fp8": 2}  # `pool_format` of layers.cpp


@dataclass(slots=True)
class _Pass:
    step: Step
    structure: CStep
    address: int  # of `structure`
    hidden: torch.Tensor  # [tokens, hidden_size]
    heads: Heads  # views of one buffer, which every layer overwrites
    tables: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    """Memory that a layer's C++ structure points to."""

    matrices: list[Matrix | None]  # qkv, o, router; latents' queries, keys, values; gate_up and down of shared experts
    mlps: ctypes.Array[CMlp]
    owners: list[Matrix]  # of the memory that `mlps` points to
    vectors: list[torch.Tensor | None]  # norms: input, qk, post, query latents, latents; corrections; float32

    @classmethod
    def make(cls, weights: LayerWeights, arena: Arena) -> "_Layer":
        def packed(weight: Projection | None, bias: torch.Tensor | None = None) -> Matrix | None:
            return None if weight is None else pack(weight, bias, arena)

        def mlp(own: MlpWeights) -> list[Matrix]:
            return [pack_gates(own.gate_up, own.gate_up_bias, arena), pack(own.down, own.down_bias, arena)]

        latents, matrices = weights.latents, [packed(weights.qkv, weights.qkv_bias), packed(weights.o, weights.o_bias)]
        matrices.append(packed(weights.router, weights.router_bias))
        norms = [weights.input_norm, weights.qk_norm, weights.post_norm, None, None]
        if latents is not None:
            norms[3:] = [latents.query_norm, latents.norm]
            matrices += [packed(latents.queries), packed(latents.keys), packed(latents.values)]
        else:
            matrices += [None, None, None]
        matrices += [None, None] if weights.shared is None else mlp(weights.shared)
        owners = [each for own in weights.mlps for each in mlp(own)]
        structures = [each.structure() for each in owners]
        mlps = (CMlp * len(weights.mlps))(*map(CMlp, structures[::2], structures[1::2]))
        vectors = [None if vector is None else _floats(vector) for vector in (*norms, weights.corrections)]
        return cls(matrices, mlps, owners, vectors)

    @property
    def inner_size(self) -> int:
        """Largest inner size of an MLP."""
        return LANES * max(each.num_panels for each in (self.owners[0], self.matrices[-2]) if each is not None)

    def structure(self, keys: torch.Tensor, values: torch.Tensor) -> CLayer:
        matrices = [CMatrix() if matrix is None else matrix.structure() for matrix in self.matrices]
        vectors = [None if vector is None else vector.data_ptr() for vector in self.vectors]
        return CLayer(*matrices, self.mlps, *vectors, keys.data_ptr(), values.data_ptr())


class NativeKernels:
    """`Kernels` for CPUs. Raises CompilerError if it is not available for this model or on this machine."""

    name = "native"

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        pool: KvTensors,
        num_threads: int,
        cache_folder: Path | None,
        compiling: Callable[[], None] | None = None,
        collectives: AllReduce | None = None,
        shared_cores: SharedCores | None = None,
    ) -> None:
        """`collectives`: sums over the ranks that share the model; None = the model is whole. `shared_cores`: from
        which threads are borrowed."""
        _check_limits(config, weights)
        self._collectives = collectives
        self._library = LayersLibrary(pool.dtype, cache_folder, compiling)
        self._config = config
        self._dtype = weights.embedding.dtype
        self._pool = pool
        latents = config.latent_heads
        self._rope = RopeTable(config.rope, config.head_dim if latents is None else latents.rotary, self._dtype)
        # Attention may use the threads between two calls.
        self.thread_pool = ThreadPool(self._library.library, num_threads, shared_cores)
        self._embedding = weights.embedding.contiguous()
        self._final_norm = _floats(weights.norm)
        compactor = Compactor(self._library) if self._library.reads_compact else None
        arena = Arena(packed_bytes(weights.projections), compactor)
        self._layers = [_Layer.make(layer, arena) for layer in weights.layers]
        self._lm_head = pack(weights.lm_head, None, arena)
        inner_size = max(layer.inner_size for layer in self._layers)
        self._normed = torch.empty(_GROUP_ROWS, config.hidden_size, dtype=self._dtype)
        self._inner = torch.empty(_GROUP_ROWS, inner_size, dtype=self._dtype)
        fused, wide = (0, 0) if latents is None else _latent_widths(latents, config.num_heads)
        self._fused = torch.empty(_GROUP_ROWS, fused, dtype=self._dtype)
        self._wide = torch.empty(_GROUP_ROWS, wide, dtype=self._dtype)
        rows = 0 if config.experts is None else _GROUP_ROWS
        self._gathered, self._mixed = torch.empty(2, rows, config.hidden_size, dtype=self._dtype).unbind()
        self._shares = torch.empty(rows, 0 if config.experts is None else config.experts.count)
        self._chosen = torch.empty(rows, dtype=torch.int64)
        self._inputs = torch.empty(_GROUP_ROWS * _row_bytes(weights), dtype=torch.uint8)
        self._structure = self._make_structure()
        self._address = ctypes.addressof(self._structure)

    @property
    def suits_many_rows(self) -> bool:
        """True if these kernels are the fastest for prompts too, not only for single tokens."""
        return self._library.suits_many_rows

    def _make_structure(self) -> CModel:
        config, pool, experts, latents = self._config, self._pool, self._config.experts, self._config.latent_heads
        clamped = None if experts is None else experts.clamped
        layers = (CLayer * len(self._layers))(*map(_Layer.structure, self._layers, pool.keys, pool.values))
        return CModel(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            *((0, 0, 0, 0) if latents is None else (latents.rank, latents.rotary, latents.plain, latents.value)),
            0 if latents is None else latents.query_rank or 0,
            *((0,) * 6 if experts is None else _routing(experts)),
            1.0 if experts is None or experts.router is None else experts.router.scaling,
            *((0.0, 0.0) if clamped is None else (clamped.alpha, clamped.limit)),
            _products(config),
            pool.slot_stride,
            _QUANTISED_FORMATS.get(pool.layout.dtype, 0),
            layers,
            self._lm_head.structure(),
            self._final_norm.data_ptr(),
            self._embedding.data_ptr(),
            self.thread_pool.address,
            self._normed.data_ptr(),
            self._inner.data_ptr(),
            self._inputs.data_ptr(),
            self._gathered.data_ptr(),
            self._mixed.data_ptr(),
            self._shares.data_ptr(),
            self._chosen.data_ptr(),
            self._fused.data_ptr(),
            self._wide.data_ptr(),
            config.rms_norm_eps,
        )

    def begin(self, step: Step) -> _Pass:
        config, latents = self._config, self._config.latent_heads
        queries, keys, size = config.num_heads, config.num_kv_heads, config.head_dim
        if latents is not None:
            keys, size = 0, latents.pooled  # no attention needs what is in the pool
        tokens = len(step.token_ids)
        hidden = torch.empty(tokens, config.hidden_size, dtype=self._dtype)
        heads = torch.empty(tokens, queries + 2 * keys, size, dtype=self._dtype)
        tables = self._rope.tables(step.longest)
        structure = CStep(
            tokens,
            step.positions.data_ptr(),
            step.slots.data_ptr(),
            tables[0].data_ptr(),
            tables[1].data_ptr(),
            hidden.data_ptr(),
            heads.data_ptr(),
        )
        address = ctypes.addressof(structure)
        if step.hidden is None:
            self._library.embed(self._address, address, step.token_ids.data_ptr())
        else:
            hidden.copy_(step.hidden)
        parts = torch.split(heads, [queries, keys, keys], dim=1)
        return _Pass(step, structure, address, hidden, (parts[0], parts[1], parts[2]), tables)

    def project(self, layer: int, work: _Pass) -> Heads:
        self._library.project(self._address, work.address, layer)
        return work.heads

    def finish(self, layer: int, work: _Pass, attended: torch.Tensor) -> None:
        attended = attended.contiguous()
        if self._collectives is None:
            self._library.finish(self._address, work.address, layer, attended.data_ptr())
            return
        part = torch.empty_like(work.hidden)
        self._library.output(self._address, work.address, layer, attended.data_ptr(), part.data_ptr())
        self._collectives.all_reduce(work.hidden, part)
        self._library.feed(self._address, work.address, layer, part.data_ptr())
        self._collectives.all_reduce(work.hidden, part)

    def hidden(self, work: _Pass) -> torch.Tensor:
        return work.hidden

    def select_rows(self, work: _Pass, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        work.hidden = work.hidden.index_select(0, rows)
        work.structure.tokens = len(rows)
        work.structure.hidden = work.hidden.data_ptr()
        return attended.index_select(0, rows)

    def logits(self, work: _Pass) -> torch.Tensor:
        logits = torch.empty(len(work.hidden), self._config.vocab_size)
        self._library.logits(self._address, work.address, logits.data_ptr())
        return logits


def _floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().contiguous()


def _latent_widths(latents: LatentHeads, num_heads: int) -> tuple[int, int]:
    """Returns the widths of `fused` and `wide` of layers.cpp."""
    queries = num_heads * (latents.plain + latents.rotary)
    return (latents.query_rank or queries) + latents.pooled, max(queries, num_heads * latents.value)


def _routing(experts: Experts) -> tuple[int, ...]:
    groups = (1, 1) if experts.router is None else (experts.router.groups, experts.router.chosen_groups)
    return (experts.count, experts.per_token, *groups, experts.normalised, experts.router is not None)


def _products(config: ModelConfig) -> int:
    """Returns the multiplications per token of a layer's projections."""
    inner = config.intermediate_size
    if config.experts is not None:
        inner = inner * config.experts.per_token + config.experts.shared_size
    return config.attention_weights + 3 * config.hidden_size * inner


def _row_bytes(weights: Weights) -> int:
    """Returns the most bytes of one row of input as `Inputs` of quantised_product.h or `TileRows` of tile_product.h."""
    quantised = [matrix for matrix in weights.projections if isinstance(matrix, QuantisedMatrix)]
    tiles = [-(-matrix.shape[1] // 32) * 64 for matrix in weights.projections if isinstance(matrix, torch.Tensor)]
    return max(tiles + [matrix.scales.shape[1] * (2 * matrix.format.group + 8) for matrix in quantised])


def _check_limits(config: ModelConfig, weights: Weights) -> None:
    """Raises CompilerError if the weights are not on the CPU, or a row of input is not a whole number of words."""
    if weights.embedding.device.type != "cpu":
        raise CompilerError("native kernels are for CPUs")
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    if config.latent_heads is None:
        sizes["heads · head_dim"] = config.num_heads * config.head_dim
    else:
        own = config.latent_heads
        sizes |= {"q_lora_rank": own.query_rank or 0, "qk_nope_head_dim": own.plain}
        sizes["heads · v_head_dim"] = config.num_heads * own.value
    if config.experts is not None:
        count, per_token = config.experts.count, config.experts.per_token
        sizes |= {"shared experts": config.experts.shared_size, "first layers": config.experts.dense_size}
        if count > _MOST_EXPERTS or per_token > _MOST_EXPERTS_PER_TOKEN:
            raise CompilerError(f"native kernels choose at most {_MOST_EXPERTS_PER_TOKEN} of {_MOST_EXPERTS} experts")
    for what, size in sizes.items():
        if size * weights.embedding.element_size() % _WORD_BYTES:
            raise CompilerError(f"{what} {size} is odd")
