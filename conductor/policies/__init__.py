"""Placement policies by name: built-in ones, and users' own as `FILE.py:CLASS` or `MODULE:CLASS`."""

from __future__ import annotations

from collections.abc import Callable

from conductor.policies.base import PlacementPolicy
from conductor.policies.baselines import (
    LeastLoaded,
    LocalCacheAware,
    Random,
    RoundRobin,
    SessionAffinity,
)
from conductor.policies.global_cache_aware import GlobalCacheAware
from conductor.policies.least_added_delay import LeastAddedDelay
from conductor.policies.outside import is_outside, load_policy
from protocol.errors import ConfigError

# In every row of docs/policies.md its mean and 90th percentile of TTFT are no higher than those of Algorithm 1, and the
# share of requests that meet their objective is at most half a percent lower.
DEFAULT_POLICY = LeastAddedDelay.name
PUBLISHED_POLICY = GlobalCacheAware.name  # Algorithm 1, used to reproduce published figures

_POLICIES: dict[str, Callable[[float, int], PlacementPolicy]] = {
    GlobalCacheAware.name: lambda threshold, _seed: GlobalCacheAware(threshold),
    LeastAddedDelay.name: lambda _threshold, _seed: LeastAddedDelay(),
    LocalCacheAware.name: lambda _threshold, _seed: LocalCacheAware(),
    SessionAffinity.name: lambda _threshold, _seed: SessionAffinity(),
    LeastLoaded.name: lambda _threshold, _seed: LeastLoaded(),
    RoundRobin.name: lambda _threshold, _seed: RoundRobin(),
    Random.name: lambda _threshold, seed: Random(seed),
}

POLICY_NAMES = tuple(_POLICIES)
POLICY_CHOICES = f"{', '.join(POLICY_NAMES)}, or one's own as FILE.py:CLASS or MODULE:CLASS"


def make_policy(name: str, balancing_threshold: float, seed: int = 0) -> PlacementPolicy:
    """Makes a policy by name. The name must come from the command line: a user's own policy is code that runs now.

    Raises ConfigError for an unknown name, an invalid threshold, or code that fails.
    """
    if is_outside(name):
        return load_policy(name)
    if name not in _POLICIES:
        raise ConfigError(f"placement policy {name!r} is not one of {', '.join(POLICY_NAMES)}")
    return _POLICIES[name](balancing_threshold, seed)
