"""Placement policies by name: built-in ones, and users' own as `FILE.py:CLASS` or `MODULE:CLASS`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from moonserve.conductor.placement.policies.base import PlacementPolicy
from moonserve.conductor.placement.policies.baselines import (
    GlobalCacheAware,
    LeastLoaded,
    LocalCacheAware,
    Random,
    RoundRobin,
    SessionAffinity,
)
from moonserve.conductor.placement.policies.least_added_delay import LeastAddedDelay
from moonserve.protocol.errors import ConfigError

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
    if ":" in name:
        return load_policy(name)
    if name not in _POLICIES:
        raise ConfigError(f"placement policy {name!r} is not one of {', '.join(POLICY_NAMES)}")
    return _POLICIES[name](balancing_threshold, seed)


# Users' own placement policies. A name runs code, so it is accepted from the command line only.

_POLICY_ATTRIBUTES = ("name", "balancing_threshold", "by_session", "weigh")


def load_policy(name: str) -> PlacementPolicy:
    """Makes a policy by calling its class without arguments. Raises ConfigError if it cannot be imported or made, or
    lacks an attribute of a policy."""
    place, _, class_name = name.rpartition(":")
    try:
        policy = getattr(_module_of(place), class_name)()
    except Exception as error:  # user code may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"the placement policy {name!r} cannot be created: {reason}") from error
    missing = [part for part in _POLICY_ATTRIBUTES if not hasattr(policy, part)]
    if missing:
        raise ConfigError(
            f"the placement policy {name!r} has no {', '.join(missing)}; "
            "conductor/placement/policies/base.py says what a policy is"
        )
    made: PlacementPolicy = policy
    return made


def _module_of(place: str) -> ModuleType:
    """Imports a module, or executes a file anew under a prefixed module name, so that it does not hide a module."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    spec = importlib.util.spec_from_file_location(f"moonserve_policy_{path.stem}", path)
    assert spec is not None, "every .py file has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations there
    spec.loader.exec_module(module)
    return module
