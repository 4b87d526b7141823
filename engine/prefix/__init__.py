"""Which blocks of a pool can be found by key, and which is evicted next: a radix tree over block keys. Pure."""

from engine.prefix.eviction import DEFAULT_EVICTION, EVICTION_NAMES, make_eviction
from engine.prefix.tree import RadixTree

__all__ = ["DEFAULT_EVICTION", "EVICTION_NAMES", "RadixTree", "make_eviction"]
