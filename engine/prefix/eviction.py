"""Which cached block goes first: the policies of eviction, by name. Pure.

A policy ranks blocks when they become idle: findable, and held by nobody. The smallest rank goes first, among those
that no other block extends. It knows neither keys nor chains; every call is O(1).
"""

from __future__ import annotations

from array import array

from protocol.errors import ConfigError
from protocol.ids import BlockId

Rank = tuple[int, ...]


class LeastRecentlyUsed:
    """What was let go longest ago goes first."""

    name = "lru"

    def __init__(self, num_blocks: int) -> None:
        self._clock = 0  # counts uses that ended
        self._used_at = array("Q", bytes(8 * num_blocks))

    def let_go(self, block: BlockId, hits: int) -> None:
        """The block's use has ended; it was found `hits` times since it was published."""
        self._clock += 1
        self._used_at[block] = self._clock

    def rank(self, block: BlockId) -> Rank:
        """As it was when the block was let go last; no two blocks have the same."""
        return (self._used_at[block],)

    def evicted(self, block: BlockId) -> None:
        """The block goes to make room."""


class LeastFrequentlyUsed(LeastRecentlyUsed):
    """What was found least often goes first, among equals what was let go longest ago.

    Plain counts never fall, so what was popular yesterday would stay for ever. Dynamic ageing (LFU-DA; Arlitt and
    others, "Evaluating content management techniques for Web proxy caches", 2000): a block's worth is its count plus
    the worth of the last victim, so that new blocks catch up with old counts at the pace of eviction.
    """

    name = "lfu"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._age = 0  # worth of the most worthy victim so far
        self._worth = array("Q", bytes(8 * num_blocks))

    def let_go(self, block: BlockId, hits: int) -> None:
        super().let_go(block, hits)
        self._worth[block] = self._age + hits

    def rank(self, block: BlockId) -> Rank:
        return self._worth[block], self._used_at[block]

    def evicted(self, block: BlockId) -> None:
        self._age = max(self._age, self._worth[block])


_POLICIES = {policy.name: policy for policy in (LeastRecentlyUsed, LeastFrequentlyUsed)}

EVICTION_NAMES = tuple(_POLICIES)
DEFAULT_EVICTION = LeastRecentlyUsed.name


def make_eviction(name: str, num_blocks: int) -> LeastRecentlyUsed:
    """Raises ConfigError for an unknown name."""
    if name not in _POLICIES:
        raise ConfigError(f"prefix eviction {name!r} is not one of {', '.join(EVICTION_NAMES)}")
    return _POLICIES[name](num_blocks)
