"""Attention over the paged KV pool: the implementations, selected by name."""

from __future__ import annotations

from pathlib import Path

from engine.attention.base import Attention, Geometry, Plan, Span
from engine.attention.native import NativePagedAttention
from engine.attention.torch_paged import TorchPagedAttention
from engine.kernels.library import Crew
from engine.kv_pool import KvPool
from protocol.errors import ConfigError
from protocol.native import CompilerError

__all__ = ["NAMES", "Attention", "Geometry", "Plan", "Span", "make_attention"]

NAMES = ("auto", "native", "torch", "triton")


def make_attention(
    name: str,
    geometry: Geometry,
    pool: KvPool,
    cache_folder: Path | None,
    crew: Crew | None = None,
) -> Attention:
    """Creates the implementation called `name`. auto means triton for a pool on a GPU, otherwise native, or torch
    without a `cache_folder`. Native attention runs in the threads of `crew`, or in as many own threads as torch has.
    Raises ConfigError for an unknown name, or if the implementation is not available."""
    if name not in NAMES:
        raise ConfigError(f"attention backend {name!r} is not one of {', '.join(NAMES)}")
    if name == "triton" or (name == "auto" and pool.device.type == "cuda"):
        from engine.cuda.attention import TritonAttention  # here, to avoid a circular import

        return TritonAttention(geometry, pool)
    if name == "torch" or (name == "auto" and cache_folder is None):
        return TorchPagedAttention(geometry, pool)
    try:
        return NativePagedAttention(geometry, pool, cache_folder, crew)
    except CompilerError as error:
        raise ConfigError(f"native attention cannot be had: {error}; or --kernels torch") from error
