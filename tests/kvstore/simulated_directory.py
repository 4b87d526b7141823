"""The product's directory in virtual time, fed by one stream per node that delays, loses and breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

import numpy as np

from kvstore.directory.index import Changes, Directory
from kvstore.event_log import Event, Follower
from kvstore.stored import Tier
from kvstore.subscription import changes, message_of
from protocol.ids import InstanceId
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2
from tests.kvstore.simulated_node import SimulatedNode
from tests.kvstore.simulated_time import Time

PIECE = 7  # objects of an inventory in one message
LOSS = 0.03


class Network(Time, Protocol):
    """What a stream needs of its world."""

    calm: bool

    def latency(self) -> float: ...


class SimulatedDirectory:
    """Follows all nodes; forgets everything when it crashes."""

    def __init__(self, world: Network, nodes: list[SimulatedNode]) -> None:
        self._world = world
        self._nodes = nodes
        self.crash()

    def crash(self) -> None:
        self.index = Directory()
        self._streams = [
            Stream(self._world, node, self.index, self._replace) for node in self._nodes
        ]

    def _replace(self, broken: Stream) -> None:
        """Listens again, unless the directory has crashed since."""
        if broken in self._streams:
            fresh = Stream(self._world, broken.node, self.index, self._replace, broken.is_whole)
            self._streams[self._streams.index(broken)] = fresh

    def check(self) -> None:
        """Raises AssertionError unless the index says exactly what the nodes hold."""
        self.index.validate()
        held: dict[BlockKey, dict[str, bool]] = {}
        for node in self._nodes:
            for stored in node.inventory():
                held.setdefault(stored.key, {})[node.name] = stored.tier is Tier.MEMORY
        for key, holders in held.items():
            found = {str(h.instance_id): h.in_memory for h in self.index.locate(key)}
            assert found == holders, f"directory says {found} of {key.hex()}, nodes {holders}"
        for node in self._nodes:
            num_blocks = self.index.num_blocks(InstanceId(node.name))
            assert num_blocks == sum(node.name in holders for holders in held.values())


class Stream:
    """One subscription: messages in order, each late, until it breaks."""

    def __init__(
        self,
        world: Network,
        node: SimulatedNode,
        index: Directory,
        broken: Callable[[Stream], None],
        is_whole: bool = False,
    ) -> None:
        self.node = node
        self.is_whole = is_whole  # all up to the index's next event is known
        self._world = world
        self._index = index
        self._broken = broken
        self._is_open = True
        self._instance_id = InstanceId(node.name)
        self._last_arrival = 0.0
        self._life = node.life
        self._follower: Follower | None = None
        self._inventory: Iterator[Event] | None = None
        world.later(world.latency(), self._subscribe)

    def _subscribe(self) -> None:
        if not self.node.is_up:
            self._end()
            return
        self._life = self.node.life
        in_step = self.is_whole and self._index.epoch(self._instance_id) == self._life
        next_seq = self._index.next_seq(self._instance_id) if in_step else 0
        self._follower = self.node.log.follow(next_seq)
        self._send_some()

    def _send_some(self) -> None:
        """What the node's side does each turn."""
        if self._is_over():
            return
        log, follower = self.node.log, self._follower
        assert follower is not None
        if self._inventory is not None:
            self._send_piece(follower, is_first=False)
        elif log.missed(follower):
            follower.next_seq = log.next_seq
            self._inventory = (
                Event(stored.key, stored.parent, stored.tier) for stored in self.node.inventory()
            )
            self._send_piece(follower, is_first=True)
        else:
            self._send(changes(log, self._life, follower), may_vanish=True)
        self._world.later(self._world.rng.uniform(0.01, 0.05), self._send_some)

    def _send_piece(self, follower: Follower, *, is_first: bool) -> None:
        assert self._inventory is not None
        found = list(islice(self._inventory, PIECE))
        more = len(found) == PIECE
        if not more:
            self._inventory = None
        self._send(
            message_of(self._life, follower.next_seq, found, snapshot=is_first, more=more),
            may_vanish=False,
        )

    def _send(self, events: kvstore_pb2.StoreEvents, *, may_vanish: bool) -> None:
        """In order; now and then one gets lost, with or without all that come after it."""
        if not self._world.calm and self._world.rng.random() < LOSS:
            if not may_vanish or self._world.rng.random() < 0.5:
                self._end()
            return
        arrival = max(self._last_arrival, self._world.now + self._world.latency())
        self._last_arrival = arrival
        self._world.later(arrival - self._world.now, lambda: self._take(events))

    def _take(self, events: kvstore_pb2.StoreEvents) -> None:
        """As `kvstore.directory.follower` does."""
        if not self._is_open:
            return
        tiers = np.frombuffer(events.added_tiers, np.uint8)
        taken = self._index.take(
            self._instance_id,
            events.epoch,
            Changes(
                added=events.added_keys,
                parents=events.added_parents,
                in_memory=(tiers == kvstore_pb2.STORE_TIER_MEMORY).tobytes(),
                removed=events.removed_keys,
            ),
            events.first_seq,
            events.next_seq,
            snapshot=events.snapshot,
        )
        self.is_whole = taken and not events.more
        if not taken:
            self._end()

    def _is_over(self) -> bool:
        if self._is_open and self.node.is_up and self.node.life == self._life:
            return False
        if self._is_open:
            self._end()
        return True

    def _end(self) -> None:
        self._is_open = False
        if self._follower is not None and self.node.is_up and self.node.life == self._life:
            self.node.log.leave(self._follower)
        self._world.later(self._world.rng.uniform(0.1, 1), lambda: self._broken(self))
