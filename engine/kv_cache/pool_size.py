"""Plans a replica's KV pool: layout, number of blocks and longest sequence for the available memory.

`gpu_kv_budget` computes the GPU memory that is left for KV: the worker's share minus the needs of weights and steps.
The estimate is made from shapes before anything is loaded, and is conservative: memory that turns out unused stays
unused. Only this function imports torch; everything else is pure.
"""

from dataclasses import dataclass

from moonserve.engine.config import DEFAULT_KV_BYTES, ReplicaConfig
from moonserve.engine.kv_cache.elastic_pages import Paging
from moonserve.engine.model.config import ModelConfig
from moonserve.engine.model.partition import Stage, split_into_stages
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import DTYPE_BYTES, KvLayout

RESERVE_BYTES = 1 << 30
"""GPU memory for CUDA context, kernels, cuBLAS workspace, captured graphs, staging and the allocator's fragments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Size and layout of a replica's KV pool, and the longest sequence that the replica accepts."""

    layout: KvLayout  # of the whole model
    dtype: str  # compute dtype
    num_blocks: int  # equal at all stages
    max_model_len: int
    stage: Stage
    paging: Paging | None = None  # None: fixed memory

    @property
    def own_layout(self) -> KvLayout:
        """Layout of the KV in the replica's own memory: the layers of its stage."""
        return self.layout.of_layers(len(self.stage.layers))


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Memory available for KV, and the option that determines it, for error messages."""

    nbytes: int
    option: str

    @classmethod
    def from_config(cls, config: ReplicaConfig) -> "KvBudget":
        """Returns the configured size, or the default if none is configured."""
        nbytes = config.kv_cache_memory
        nbytes = DEFAULT_KV_BYTES if nbytes is None else nbytes
        return cls(nbytes, f"--kv-cache-memory {nbytes}")


def plan_pool(
    config: ReplicaConfig, model: ModelConfig, *, rank: int = 0, num_stages: int = 1, budget: KvBudget | None = None
) -> PoolPlan:
    """Plans the pool of one pipeline stage; each stage has the configured memory. `budget`: memory found on the
    machine, in place of the configured size. Raises ConfigError if the memory does not hold a sequence of the requested
    length, or the model has fewer layers than there are stages."""
    budget = budget or KvBudget.from_config(config)
    layout = model.kv_layout(config.block_size, config.dtype, config.kv_cache_dtype)
    stages = split_into_stages(model.num_layers, num_stages)
    block_bytes = max(layout.of_layers(len(stage.layers)).block_bytes for stage in stages)
    num_blocks = budget.nbytes // block_bytes
    paging: Paging | None = None
    if config.is_elastic:
        if num_stages > 1:
            raise ConfigError("elastic KV memory does not go with --pipeline-parallel-size above 1")
        paging = Paging.within(layout, budget.nbytes)
        num_blocks = paging.num_blocks
    if num_blocks < 1:
        raise ConfigError(f"{budget.option} is less than one block of {block_bytes} bytes")
    max_model_len = _max_model_len(config, model, num_blocks * config.block_size, budget)
    return PoolPlan(
        layout=layout,
        dtype=model.resolve_dtype(config.dtype),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        stage=stages[rank],
        paging=paging,
    )


def _max_model_len(config: ReplicaConfig, model: ModelConfig, pool_tokens: int, budget: KvBudget) -> int:
    requested = config.max_model_len
    require_positions(model, requested)
    if requested is None:
        return min(model.max_position_embeddings, pool_tokens)
    if requested > pool_tokens:
        raise ConfigError(f"--max-model-len {requested} exceeds the {pool_tokens} tokens that {budget.option} holds")
    return requested


def require_positions(model: ModelConfig, max_model_len: int | None) -> None:
    """Raises ConfigError if sequences of the requested length have more positions than the model."""
    most = model.max_position_embeddings
    if max_model_len is not None and max_model_len > most:
        raise ConfigError(f"--max-model-len {max_model_len} exceeds the model's {most} positions")


def gpu_kv_budget(config: ReplicaConfig, model: ModelConfig) -> KvBudget:
    """Returns the memory for KV on this process's GPU. Raises ConfigError, with the remedy, if there is too little."""
    import torch

    free, total = torch.cuda.mem_get_info()
    share = int(total * config.gpu_memory_utilization)
    flag = f"--gpu-memory-utilization {config.gpu_memory_utilization:g}"
    if share > free:
        raise ConfigError(
            f"{flag} of the GPU's {total} bytes is more than the {free} that are free: lower it, or stop other "
            "processes on the GPU"
        )
    dtype_bytes = DTYPE_BYTES[model.resolve_dtype(config.dtype)]
    taken = weight_bytes(model, dtype_bytes) + step_bytes(config, model, dtype_bytes)
    left = share - taken - RESERVE_BYTES
    if left <= 0:
        raise ConfigError(
            f"{flag} is {share} bytes; weights and steps take {taken} and {RESERVE_BYTES} are kept in reserve: raise "
            "it, lower --max-num-batched-tokens, or use a smaller model"
        )
    return KvBudget(left, flag)


BITS_PER_WEIGHT = {"int4": 4.5, "int8": 8.125}
"""Bits that a weight takes with `--quantize`, its share of a scale included."""


def weight_bytes(model: ModelConfig, dtype_bytes: int, quantise: str = "auto") -> int:
    """Returns the bytes of all weights as the engine holds them. `quantise`: a `--quantize` value."""
    hidden, heads = model.hidden_size, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    inner, mlps, router = model.num_layers * model.intermediate_size, 1, 0
    if model.experts is not None:
        mlps = model.experts.count
        inner = int(model.experts.inner_size(model.num_layers, model.intermediate_size, mlps))
        router = mlps * (hidden + 1)
    attention, mlp = model.num_layers * model.attention_weights, 3 * hidden * inner
    mlp_biases = (mlps if model.mlp_bias else 1) * (2 * model.intermediate_size + hidden)
    biases = heads + hidden + mlp_biases  # counted for every family
    norms = 2 * hidden + 2 * model.head_dim + model.num_heads * model.attention_sinks
    vectors = hidden + model.num_layers * (biases + norms + router)
    matrices, vocabulary = attention + mlp, model.vocab_size * hidden
    if quantise in BITS_PER_WEIGHT:
        rounded = matrices * BITS_PER_WEIGHT[quantise] + vocabulary * BITS_PER_WEIGHT["int8"]
        return (vectors + vocabulary) * dtype_bytes + int(rounded) // 8
    bits, head = 8.0 * dtype_bytes, 0.0 if model.tie_word_embeddings else 8.0 * dtype_bytes * vocabulary
    if model.quantised is not None and not model.quantised.is_float:
        bits = model.quantised.bits_per_weight
        if model.quantised.method == "mxfp4":  # of experts only
            vectors, matrices = vectors + attention, mlp
        head = head if model.quantised.head_bits is None else model.quantised.head_bits * vocabulary
    return (vectors + vocabulary) * dtype_bytes + int(matrices * bits + head) // 8


def step_bytes(config: ReplicaConfig, model: ModelConfig, dtype_bytes: int) -> int:
    """Returns the bytes of the largest step's intermediate results: a few rows of each width per token, two float32
    rows of logits per sequence, and the table of rotations."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    per_token = 4 * model.hidden_size + 2 * heads + 3 * model.intermediate_size
    logits = 2 * config.max_num_seqs * model.vocab_size * DTYPE_BYTES["float32"]
    rotations = 2 * model.max_position_embeddings * model.head_dim * DTYPE_BYTES["float32"]
    return config.max_num_batched_tokens * per_token * dtype_bytes + logits + rotations
