"""Conductors beside this one: standbys, of which one leads (`leader_election_state`), or other active ones
(`shard_state`), each of which places requests on the instances that are registered with it.

Neither kind shares state. A new leader, and a shard that gets instances, learn all from registrations and heartbeats.
"""

import math
from dataclasses import dataclass, field

from moonserve.protocol.membership.shards import HotPrefixes, Shard

_USELESS = 10**9  # above the imbalance of any shares


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """What an active conductor tells the others and the gateways, several times a second."""

    address: str
    num_prefills: int = 0  # that accept work
    num_decodes: int = 0
    wait_s: float = math.inf  # usual wait of a new prompt for its prefill; infinite = there is no instance
    num_requests: float = 0.0  # in about the last minute, as `HotPrefixLearner` counts
    hot: HotPrefixes = field(default_factory=dict)  # as this shard sees it
    missing_homes: frozenset[str] = frozenset()  # home stores of its workers that are registered elsewhere or nowhere

    @property
    def shard(self) -> Shard:
        return Shard.of_workers(self.address, self.num_prefills, self.num_decodes)


def imbalance(num_prefills: int, num_decodes: int) -> int:
    """Returns a shard's part of the sum that moves lower. Equal shares of both roles, and of their difference, have the
    least; a shard whose workers can place nothing costs more than any shares."""
    unequal = num_prefills**2 + num_decodes**2 + (num_prefills - num_decodes) ** 2
    return unequal + _USELESS * is_useless(num_prefills, num_decodes)


def is_useless(num_prefills: int, num_decodes: int) -> bool:
    """Returns True for workers that can place nothing, because a role is missing."""
    return (num_prefills == 0) != (num_decodes == 0)
