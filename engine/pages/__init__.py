"""A pool that hands out blocks to very many requests (ten million at once): who holds which block, nothing of bytes.

`PagePool` (pool.py) is what others use. The books are kept by a core: C (pages.c), compiled on first use, or its twin
in Python. A block here is what it is everywhere: `block_size` tokens of KV, by its number.
"""

from engine.pages.base import Eviction, PoolConfig, Stats
from engine.pages.pool import PagePool

__all__ = ["Eviction", "PagePool", "PoolConfig", "Stats"]
