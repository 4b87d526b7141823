"""Which objects leave a node: policies by name (below, `policies`), the choice among tenants (`quotas`), what happens
to a victim (`evictor`). Pure."""

from collections.abc import Callable

from moonserve.kvstore.state.eviction.base import EvictionPolicy
from moonserve.kvstore.state.eviction.policies import (
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    LengthAware,
    ReuseCredit,
    S3Fifo,
)
from moonserve.protocol.errors import ConfigError

__all__ = [
    "DEFAULT_POLICY",
    "POLICY_NAMES",
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
