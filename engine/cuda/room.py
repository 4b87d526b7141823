"""Computes the GPU memory that is left for KV: the worker's share minus the needs of weights and steps.

The estimate is made from shapes before anything is loaded, and is conservative. Memory that turns out unused stays
unused.
"""

from __future__ import annotations

import torch

from engine.config import ModelConfig
from engine.pool_plan import Room
from engine.replica_config import ReplicaConfig
from protocol.errors import ConfigError
from protocol.layout import DTYPE_BYTES

# CUDA context, kernels, cuBLAS workspace, captured graphs, staging, and fragmentation of torch's allocator.
RESERVE_BYTES = 1 << 30


def room_on_gpu(config: ReplicaConfig, model: ModelConfig) -> Room:
    """Returns the memory for KV on this process's GPU. Raises ConfigError, with the remedy, if there is too little."""
    free, total = torch.cuda.mem_get_info()
    share = int(total * config.gpu_memory_utilization)
    flag = f"--gpu-memory-utilization {config.gpu_memory_utilization:g}"
    if share > free:
        raise ConfigError(
            f"{flag} of the GPU's {total} bytes is more than the {free} that are free: lower it, or end what uses the "
            "GPU"
        )
    dtype_bytes = DTYPE_BYTES[model.resolve_dtype(config.dtype)]
    taken = weight_bytes(model, dtype_bytes) + step_bytes(config, model, dtype_bytes)
    left = share - taken - RESERVE_BYTES
    if left <= 0:
        raise ConfigError(
            f"{flag} is {share} bytes; weights and steps take {taken} and {RESERVE_BYTES} are kept in reserve: raise "
            "it, lower --max-num-batched-tokens, or take a smaller model"
        )
    return Room(left, flag)


def weight_bytes(model: ModelConfig, dtype_bytes: int) -> int:
    """Returns the bytes of all weights as the engine holds them."""
    hidden, heads = model.hidden_size, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attention = hidden * heads + model.num_heads * model.head_dim * hidden
    mlp = 3 * hidden * model.intermediate_size
    biases = heads + 2 * model.intermediate_size + 2 * hidden  # counted for every family
    norms = 2 * hidden + 2 * model.head_dim
    vocabulary = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    layers = model.num_layers * (attention + mlp + biases + norms)
    return (layers + vocabulary + hidden) * dtype_bytes


def step_bytes(config: ReplicaConfig, model: ModelConfig, dtype_bytes: int) -> int:
    """Returns the bytes of the largest step's intermediate results: a few rows of each width per token, two float32
    rows of logits per sequence, and the table of rotations."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    per_token = 4 * model.hidden_size + 2 * heads + 3 * model.intermediate_size
    logits = 2 * config.max_num_seqs * model.vocab_size * DTYPE_BYTES["float32"]
    rotations = 2 * model.max_position_embeddings * model.head_dim * DTYPE_BYTES["float32"]
    return config.max_num_batched_tokens * per_token * dtype_bytes + logits + rotations
