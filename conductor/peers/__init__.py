"""Conductors beside this one: standbys, of which one leads (`leader_election_state`), or other active ones
(`shard_state`), each of which places requests on the instances that are registered with it.

Neither kind shares state. A new leader, and a shard that gets instances, learn all from registrations and heartbeats.
"""

import math
from dataclasses import dataclass, field

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
        return Shard.of_workers(self.address, self.num_prefills, self.num_decodes)
