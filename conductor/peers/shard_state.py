"""One shard's view of the others, and which prompts and instances it leaves to them. Pure: time is an argument.

Shards tell each other a `ShardSummary` several times a second. It is stale by design: a shard knows its own instances
exactly and uses summaries only to send prompts away whose wait here is much longer than the usual one elsewhere, to
share instances equally, and to learn hot prefixes. A shard that is silent for `SILENT_AFTER_S` counts as gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moonserve.conductor.events import Place
from moonserve.conductor.members import Instance, Members
from moonserve.conductor.peers import ShardSummary, merged_hot
from moonserve.conductor.peers.hot_prefixes import HotPrefixLearner
from moonserve.conductor.placement.in_flight import PlacementPlan
from moonserve.protocol.membership.shards import HotPrefixes, Shard, in_order, routing_key
from moonserve.protocol.request import InstanceId, Role

SILENT_AFTER_S = 1.0
SPILL_FACTOR = 1.5
"""A prompt is sent away if its wait is this many times the usual one elsewhere."""
WAIT_PER_WORK = 4.0
"""Seconds of waiting that sending a prompt away must save per second of work that it adds, since its prefix is here."""
MIN_GAIN_S = 0.02
"""Seconds that it must save besides: another call and stale figures cost as much."""
MOVED_SHARE = 1 / 4
"""Share of the surplus instances that move at once."""
WORKERS = (Role.PREFILL, Role.DECODE)


class ShardState:
    """One shard. Its `address` is the one that clients use."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._learner = HotPrefixLearner()
        self._peers: dict[str, tuple[ShardSummary, float]] = {}  # by address, with the time of the last one
        self._shards: tuple[Shard, ...] = ()  # of the peers
        self._moves: dict[InstanceId, str] = {}
        self.hot: HotPrefixes = {}
        """What is hot in the fleet."""

    # Summaries

    def tick(self, members: Members, now: float) -> ShardSummary:
        """Forgets silent shards, decides which instances move, and returns the own summary."""
        for address, (_, heard_at) in list(self._peers.items()):
            if now - heard_at > SILENT_AFTER_S:
                del self._peers[address]
        peers = [summary for summary, _ in self._peers.values()]
        self._shards = tuple(peer.shard for peer in peers)
        fleet_requests = self._learner.num_requests + sum(peer.num_requests for peer in peers)
        own_hot = self._learner.hot(self.hot, 1 + len(peers), fleet_requests, now)
        own = ShardSummary(
            address=self.address,
            num_prefills=int(members.prefills.is_open.sum()),
            num_decodes=int(members.decodes.is_open.sum()),
            wait_s=_usual_wait_s(members, now),
            num_requests=self._learner.num_requests,
            hot=own_hot,
        )
        self.hot = merged_hot((own, *peers))
        self._moves = _moves(own, peers, members)
        return own

    def hear(self, summary: ShardSummary, now: float) -> None:
        """Records what another shard told."""
        self._peers[summary.address] = summary, now

    def known(self) -> list[ShardSummary]:
        """Returns the latest summaries of the other live shards."""
        return [summary for summary, _ in self._peers.values()]

    # Decisions

    def elsewhere(self, place: Place, plan: PlacementPlan) -> str | None:
        """Returns the shard that should place this prompt instead, or None. Call it once per prompt."""
        self._learner.observe(place.block_keys, self.hot)
        if place.is_redirected or not self._shards:
            return None
        key = routing_key(place.block_keys, self.hot, place.request_id.encode())
        address = in_order(key, self._shards)[0].address
        other = self._peers[address][0]
        wait_s = plan.decision.predicted_ttft_s - plan.prefill_s
        added_s = plan.prefill.registration.prefill_profile.seconds(place.num_prompt_tokens, 0) - plan.prefill_s
        gain_s = wait_s - other.wait_s - WAIT_PER_WORK * max(added_s, 0.0)
        return address if gain_s > MIN_GAIN_S and wait_s > SPILL_FACTOR * other.wait_s else None

    def move_of(self, instance_id: InstanceId) -> str | None:
        """Returns the shard where an instance should register instead, at most once, or None."""
        return self._moves.pop(instance_id, None)


def _usual_wait_s(members: Members, now: float) -> float:
    waits = members.prefills.estimate_s(now)[members.prefills.is_open]
    return float(np.median(waits)) if len(waits) else math.inf


def _moves(own: ShardSummary, peers: Sequence[ShardSummary], members: Members) -> dict[InstanceId, str]:
    """Returns the instances that this shard has too many of, with their new shards. Of each role, the shard with the
    most gives to the one with the fewest, the second to the second, and so on. Instances that share a home store stay
    together. With fewer workers of a role than shards, only the first shards have any, since one needs both roles."""
    shards = sorted((own, *peers), key=lambda shard: shard.address)
    used = shards[: max(min(sum(_count(shard, role) for shard in shards) for role in WORKERS), 1)]
    moves: dict[InstanceId, str] = {}
    for role in WORKERS:
        ranked = sorted(used, key=lambda shard: (_count(shard, role), shard.address))
        target = ranked[len(used) - 1 - ranked.index(own)] if own in used else ranked[0]
        if target is own:
            continue
        here = [each for each in members.with_role(role) if each.instance_id not in moves]
        there = _count(target, role) + len(members.with_role(role)) - len(here)
        excess = (len(here) - there) // 2 if own in used else len(here)
        for instance in here[len(here) - math.ceil(max(excess, 0) * MOVED_SHARE) :]:
            moves |= dict.fromkeys(_group(instance, members), target.address)
    return moves


def _count(shard: ShardSummary, role: Role) -> int:
    return shard.num_prefills if role is Role.PREFILL else shard.num_decodes


def _group(instance: Instance, members: Members) -> list[InstanceId]:
    """Returns the instance, its home store and all that share it."""
    home = instance.registration.home_store
    if home is None:
        return [instance.instance_id]
    return [each.instance_id for each in members if home in (each.instance_id, each.registration.home_store)]
