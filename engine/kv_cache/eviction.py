"""Eviction policies for cached blocks, by name. Pure.

A policy ranks blocks when they become idle, that is, findable but not held. Among the blocks that no other block
extends, the smallest rank is evicted first. A policy knows neither keys nor chains; every call is O(1).
"""

from array import array

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import BlockId

Rank = tuple[int, ...]


class LeastRecentlyUsed:
    """Evicts the block that was released longest ago."""

    name = "lru"

    def __init__(self, num_blocks: int) -> None:
        self._clock = 0  # counts calls of `let_go`
        self._used_at = array("Q", bytes(8 * num_blocks))

    def mark_idle(self, block: BlockId, hits: int) -> None:
        """Records that a block became idle, with `hits` cache hits since it was published."""
        self._clock += 1
        self._used_at[block] = self._clock

    def rank(self, block: BlockId) -> Rank:
        """Returns the rank that the block got when it last became idle. Ranks are unique."""
        return (self._used_at[block],)

    def on_evicted(self, block: BlockId) -> None:
        """Records that the block is evicted."""


class LeastFrequentlyUsed(LeastRecentlyUsed):
    """Evicts the block with the fewest hits; among equals, the one that was released longest ago.

    Plain counts never fall, so blocks that were popular once would stay for ever. With dynamic ageing (LFU-DA; Arlitt
    and others, "Evaluating content management techniques for Web proxy caches", 2000) a block's worth is its count plus
    the worth of the last victim, so that new blocks catch up with old counts at the pace of eviction.
    """

    name = "lfu"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._age = 0  # highest worth of a victim so far
        self._worth = array("Q", bytes(8 * num_blocks))

    def mark_idle(self, block: BlockId, hits: int) -> None:
        super().mark_idle(block, hits)
        self._worth[block] = self._age + hits

    def rank(self, block: BlockId) -> Rank:
        return self._worth[block], self._used_at[block]

    def on_evicted(self, block: BlockId) -> None:
        self._age = max(self._age, self._worth[block])


_POLICIES = {policy.name: policy for policy in (LeastRecentlyUsed, LeastFrequentlyUsed)}

EVICTION_NAMES = tuple(_POLICIES)
DEFAULT_EVICTION = LeastRecentlyUsed.name


def make_eviction(name: str, num_blocks: int) -> LeastRecentlyUsed:
    """Creates the policy called `name`. Raises ConfigError for an unknown name."""
    if name not in _POLICIES:
        raise ConfigError(f"prefix eviction {name!r} is not one of {', '.join(EVICTION_NAMES)}")
    return _POLICIES[name](num_blocks)
