"""Prefix index of a block pool: a radix tree over block keys, and eviction policies. Pure."""

from engine.prefix.eviction import DEFAULT_EVICTION, EVICTION_NAMES, make_eviction
from engine.prefix.tree import RadixTree

__all__ = ["DEFAULT_EVICTION", "EVICTION_NAMES", "RadixTree", "make_eviction"]
