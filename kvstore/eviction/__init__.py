"""Eviction policies by name: which object is evicted first when space is needed. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.eviction.base import EvictionPolicy
from kvstore.eviction.ranked import (
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    LengthAware,
)
from kvstore.eviction.reuse_credit import ReuseCredit
from kvstore.eviction.s3_fifo import S3Fifo
from protocol.errors import ConfigError

__all__ = [
    "DEFAULT_POLICY",
    "POLICY_NAMES",
    "EvictionPolicy",
    "FirstInFirstOut",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "LengthAware",
    "ReuseCredit",
    "S3Fifo",
    "make",
]

DEFAULT_POLICY = LeastRecentlyUsed.name

_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    LeastRecentlyUsed.name: LeastRecentlyUsed,
    LeastFrequentlyUsed.name: LeastFrequentlyUsed,
    FirstInFirstOut.name: FirstInFirstOut,
    LengthAware.name: LengthAware,
    S3Fifo.name: S3Fifo,
    ReuseCredit.name: ReuseCredit,
}

POLICY_NAMES = tuple(_POLICIES)


def make(name: str) -> EvictionPolicy:
    """Returns a new policy. Raises ConfigError for an unknown name."""
    if name not in _POLICIES:
        raise ConfigError(f"eviction policy {name!r} is not one of {', '.join(POLICY_NAMES)}")
    return _POLICIES[name]()
