"""Computes the bytes that a decode step must read: all weights once, and the KV of every sequence."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engine.shapes import Shape
from engine.config import ModelConfig, load_model_config
from protocol.layout import DTYPE_BYTES


def step_bytes(folder: Path, dtype: str, shape: Shape) -> int:
    """Returns the bytes of weights and KV that a decode step reads; unused rows of the embedding do not count."""
    config = load_model_config(folder)
    return DTYPE_BYTES[dtype] * (_weights(config) + shape.batch * shape.context * _kv(config))


def _weights(config: ModelConfig) -> int:
    hidden, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads
    attention = hidden * (heads + config.num_heads) * config.head_dim
    layer = attention + 3 * hidden * config.intermediate_size
    return config.num_layers * layer + config.vocab_size * hidden


def _kv(config: ModelConfig) -> int:
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim
