"""One shard's view of the others, and which prompts and instances it leaves to them. Pure: time is an argument.

Shards tell each other a `ShardSummary` several times a second. It is stale by design: a shard knows its own instances
exactly and uses summaries only to send prompts away whose wait here is much longer than the usual one elsewhere, to
share instances equally, and to learn hot prefixes. A shard that is silent for `SILENT_AFTER_S` counts as gone.
"""

import math
from collections.abc import Sequence

import numpy as np

from moonserve.conductor.events import Place
from moonserve.conductor.members import Instance, Members
from moonserve.conductor.peers import ShardSummary, imbalance, is_useless
from moonserve.conductor.peers.hot_prefixes import HotPrefixLearner
from moonserve.conductor.placement.in_flight import PlacementPlan
from moonserve.protocol.kv_blocks import digest64
from moonserve.protocol.membership.shards import HotPrefixes, Shard, in_order, merged_hot, routing_key
from moonserve.protocol.request import InstanceId, Role

SILENT_AFTER_S = 1.0
SPILL_FACTOR = 1.5
"""A prompt is sent away if its wait is this many times the usual one elsewhere."""
WAIT_PER_WORK = 2.0
"""Seconds of waiting that sending a prompt away must save per second of its whole prefill: the other shard computes
what is cached here, and this one the rest when the prompt returns, longer."""
MIN_GAIN_S = 0.02
"""Seconds that it must save besides: another call and stale figures cost as much."""
MOVED_SHARE = 1 / 2
"""Share of the surplus instances that move at once."""
SETTLE_S = 1.5
"""Time after a move for the rest of the group to follow, each with its next heartbeat, and for summaries to show it."""


class ShardState:
    """One shard. Its `address` is the one that clients use."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._learner = HotPrefixLearner()
        self._peers: dict[str, tuple[ShardSummary, float]] = {}  # by address, with the time of the last one
        self._shards: tuple[Shard, ...] = ()  # of the peers
        self._moves: dict[InstanceId, str] = {}
        self._moved_at = -math.inf
        self.hot: HotPrefixes = {}  # in the fleet

    # Summaries

    def tick(self, members: Members, now: float) -> ShardSummary:
        """Forgets silent shards, decides which instances move, and returns the own summary."""
        self._peers = {a: (told, at) for a, (told, at) in self._peers.items() if now - at <= SILENT_AFTER_S}
        peers = [summary for summary, _ in self._peers.values()]
        self._shards = tuple(peer.shard for peer in peers)
        fleet_requests = self._learner.num_requests + sum(peer.num_requests for peer in peers)
        own_hot = self._learner.hot(self.hot, 1 + len(peers), fleet_requests, now)
        waits_s = members.prefills.estimate_s(now)[members.prefills.is_open]
        own = ShardSummary(
            address=self.address,
            num_prefills=int(members.prefills.is_open.sum()),
            num_decodes=int(members.decodes.is_open.sum()),
            wait_s=float(np.median(waits_s)) if len(waits_s) else math.inf,
            num_requests=self._learner.num_requests,
            hot=own_hot,
            missing_homes=frozenset(home for home in map(_home, members) if members.find(home) is None),
        )
        self.hot = merged_hot(shard.hot for shard in (own, *peers))
        if now > self._moved_at + 3 * SETTLE_S:
            self._moves.clear()  # of instances that are gone
        # In the mean, one shard gives away instances at a time: with old figures, all would fill the same one.
        is_turn = digest64(self.address, round(now * 1e3)) % (1 + len(peers)) == 0
        if is_turn and not self._moves and now > self._moved_at + SETTLE_S:
            self._moves = _moves(own, peers, members)
            self._moved_at = now
        return own

    def hear(self, summary: ShardSummary, now: float) -> None:
        """Records what another shard told."""
        self._peers[summary.address] = summary, now

    # Decisions

    def elsewhere(self, place: Place, plan: PlacementPlan) -> str | None:
        """Returns the shard that should place this prompt instead, or None. Call it once per prompt."""
        self._learner.observe(place.block_keys, self.hot)
        if place.is_redirected or not self._shards:
            return None
        key = routing_key(place.block_keys, self.hot, place.request_id.encode())
        address = in_order(key, self._shards)[0].address
        other = self._peers[address][0]
        wait_s = plan.predicted.queue_s or 0.0
        added_s = plan.prefill.registration.prefill_profile.seconds(place.num_prompt_tokens, 0)
        gain_s = wait_s - other.wait_s - WAIT_PER_WORK * added_s
        return address if gain_s > MIN_GAIN_S and wait_s > SPILL_FACTOR * other.wait_s else None

    def joined(self, now: float) -> None:
        """Records that an instance has registered here. Others of its group may follow."""
        self._moved_at = now

    def move_of(self, instance_id: InstanceId, now: float) -> str | None:
        """Returns the shard where an instance should register instead, at most once, or None."""
        address = self._moves.pop(instance_id, None)
        if address is not None:
            self._moved_at = now
        return address


def _moves(own: ShardSummary, peers: Sequence[ShardSummary], members: Members) -> dict[InstanceId, str]:
    """Returns instances with their new shards: those with a home store here that workers of another shard lack, or else
    those that this shard has too many of, whose move lowers `imbalance` most. Instances that share a home store stay
    together."""
    for peer in peers:
        lacked = {home for home in peer.missing_homes if members.find(home)}
        if lacked:
            return {instance.instance_id: peer.address for instance in members if _home(instance) in lacked}
    best: tuple[int, ShardSummary, list[list[Instance]]] | None = None
    here = own.num_prefills, own.num_decodes
    movable = {here: [list(members)]} if is_useless(*here) else _groups(members)
    for (prefills, decodes), groups in movable.items():
        for peer in peers:
            there = peer.num_prefills, peer.num_decodes
            gain = imbalance(*here) + imbalance(*there)
            gain -= imbalance(here[0] - prefills, here[1] - decodes)
            gain -= imbalance(there[0] + prefills, there[1] + decodes)
            if gain > 0 and (best is None or gain > best[0]):
                surplus = max((here[0] - there[0]) * (prefills > 0), (here[1] - there[1]) * (decodes > 0)) // 2
                best = gain, peer, groups[: max(int(surplus * MOVED_SHARE) // (prefills + decodes), 1)]
    if best is None:
        return {}
    _, target, groups = best
    return {instance.instance_id: target.address for group in groups for instance in group}


def _home(instance: Instance) -> InstanceId:
    """Returns the name that instances which belong together share: that of their home store."""
    return instance.registration.home_store or instance.instance_id


def _groups(members: Members) -> dict[tuple[int, int], list[list[Instance]]]:
    """Returns the groups of instances that stay together, by their numbers of prefill and decode workers."""
    by_home: dict[str, list[Instance]] = {}
    for instance in members:
        by_home.setdefault(_home(instance), []).append(instance)
    groups: dict[tuple[int, int], list[list[Instance]]] = {}
    for group in by_home.values():
        roles = [instance.role for instance in group if not instance.draining]
        shape = roles.count(Role.PREFILL), roles.count(Role.DECODE)
        if any(shape):
            groups.setdefault(shape, []).append(group)
    if (1, 0) in groups and (0, 1) in groups:  # a shard without any can use only both
        pairs = [a + b for a, b in zip(groups[1, 0], groups[0, 1], strict=False)]
        groups.setdefault((1, 1), []).extend(pairs)
    return groups
