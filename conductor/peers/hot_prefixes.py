"""Learns which prefixes too many prompts share for one shard, such as system prompts. Pure.

Counts are decayed sums over about the last minute. A prefix becomes hot at `HOT_SHARE` of a shard's fair part of all
requests, and stays hot down to half of that. Where its prompts differ is learned from the prompts themselves, so that a
long system prompt is one entry.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.membership.shards import HotPrefixes

HALF_LIFE_S = 30.0
HOT_SHARE = 0.1
MIN_COUNT = 64.0
"""One session, however busy, does not count so many requests."""
MAX_KEYS = 50_000
_FORGOTTEN_BELOW = 0.7  # a key that was seen once is forgotten after half of a half-life


@dataclass(slots=True, eq=False)
class _Count:
    """Prompts that share one block."""

    example: Sequence[BlockKey]
    num_common: int  # blocks that all of them share
    count: float = 1.0

    def add(self, block_keys: Sequence[BlockKey]) -> None:
        self.count += 1.0
        common = min(self.num_common, len(block_keys))
        if block_keys[common - 1] == self.example[common - 1]:
            return  # keys are chained, so all earlier ones are equal; a prompt that only ends sooner differs nowhere
        while block_keys[common - 1] != self.example[common - 1]:
            common -= 1
        self.num_common = common


class HotPrefixLearner:
    """Counts the prompts of one shard by their shared blocks."""

    def __init__(self) -> None:
        self._counts: dict[BlockKey, _Count] = {}
        self._decayed_at = 0.0
        self.num_requests = 0.0  # decayed number of prompts

    def observe(self, block_keys: Sequence[BlockKey], hot: HotPrefixes) -> None:
        """Counts a prompt at its routing key and at the hot blocks before it."""
        self.num_requests += 1.0
        depth = 0
        while depth < len(block_keys):
            key = block_keys[depth]
            known = self._counts.get(key)
            if known is not None:
                known.add(block_keys)
            elif len(self._counts) < MAX_KEYS:
                self._counts[key] = _Count(block_keys, len(block_keys))
            branch = hot.get(key)
            if branch is None:
                return
            depth = max(branch, depth + 1)

    def hot(self, known: HotPrefixes, num_shards: int, fleet_requests: float, now: float) -> HotPrefixes:
        """Returns what is hot as this shard sees it. `known`: what is hot in the fleet, so that its prompts are spread
        over all shards; `fleet_requests`: `num_requests` of all shards together."""
        self._decay(now)
        limit = max(HOT_SHARE * fleet_requests / num_shards, MIN_COUNT)
        kept_limit = limit / 2 / num_shards
        counts = self._counts.items()
        return {key: c.num_common for key, c in counts if c.count >= (kept_limit if key in known else limit)}

    def _decay(self, now: float) -> None:
        share = math.exp2((self._decayed_at - now) / HALF_LIFE_S)
        self._decayed_at = now
        self.num_requests *= share
        for key, counted in list(self._counts.items()):
            counted.count *= share
            if counted.count < _FORGOTTEN_BELOW:
                del self._counts[key]
