"""Conductors beside this one: standbys, of which one leads (`leader_election_state`), or other active ones
(`shard_state`), each of which places requests on the instances that are registered with it.

Neither kind shares state. A new leader, and a shard that gets instances, learn all from registrations and heartbeats.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.membership.shards import HotPrefixes, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """What an active conductor tells the others and the gateways, several times a second."""

    address: str
    num_prefills: int = 0  # that accept work
    num_decodes: int = 0
    wait_s: float = math.inf  # usual wait of a new prompt for its prefill; infinite = there is no instance
    num_requests: float = 0.0  # in about the last minute, as `HotPrefixLearner` counts
    hot: HotPrefixes = field(default_factory=dict)  # as this shard sees it

    @property
    def shard(self) -> Shard:
        """The shard with its capacity as weight: 0 if it cannot place anything."""
        return Shard(address=self.address, weight=float(self.num_prefills if self.num_decodes else 0))

    @property
    def is_useless(self) -> bool:
        """True if it has workers that can place nothing, because a role is missing."""
        return (self.num_prefills == 0) != (self.num_decodes == 0)


def merged_hot(summaries: Iterable[ShardSummary]) -> HotPrefixes:
    """Returns what is hot at any shard, with the earliest place at which its prompts differ."""
    merged: dict[BlockKey, int] = {}
    for summary in summaries:
        for key, branch in summary.hot.items():
            merged[key] = min(branch, merged.get(key, branch))
    return merged
