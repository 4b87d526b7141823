"""Attention over the paged KV pool, one file per implementation, chosen by name."""

from __future__ import annotations

from engine.attention.base import Attention, Geometry, Plan, Span
from engine.attention.torch_paged import TorchPagedAttention
from engine.kv_pool import KvPool
from protocol.errors import ConfigError

BACKENDS = {"torch": TorchPagedAttention}

__all__ = ["BACKENDS", "Attention", "Geometry", "Plan", "Span", "make_attention"]


def make_attention(name: str, geometry: Geometry, pool: KvPool) -> Attention:
    """The implementation called `name`. Raises ConfigError naming those there are."""
    backend = BACKENDS.get(name)
    if backend is None:
        raise ConfigError(f"attention backend {name!r} is not one of {', '.join(BACKENDS)}")
    return backend(geometry, pool)
