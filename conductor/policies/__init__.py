"""Placement policies by name."""

from __future__ import annotations

from collections.abc import Callable

from conductor.policies.base import PlacementPolicy
from conductor.policies.global_cache_aware import GlobalCacheAware
from conductor.policies.least_loaded import LeastLoaded
from protocol.errors import ConfigError

DEFAULT_POLICY = GlobalCacheAware.name

_POLICIES: dict[str, Callable[[float], PlacementPolicy]] = {
    GlobalCacheAware.name: GlobalCacheAware,
    LeastLoaded.name: lambda _balancing_threshold: LeastLoaded(),
}

POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str, balancing_threshold: float) -> PlacementPolicy:
    """Raises ConfigError for an unknown name or a threshold the policy cannot use."""
    if name not in _POLICIES:
        raise ConfigError(f"placement policy {name!r} is not one of {', '.join(POLICY_NAMES)}")
    return _POLICIES[name](balancing_threshold)
