"""Membership of the store nodes, and the order in which to ask them for a key.

Readers see one immutable `View`, replaced as a whole when the membership changes. An unreachable registry changes
nothing. Does not know where a key is stored.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.client.node import Means, StoreNode
from kvstore.client.placement import Placement
from protocol.errors import NoWorker
from protocol.keys import BlockKey
from protocol.machine import host_identity
from protocol.registry.base import Member, Registry
from protocol.registry.known import KnownMembers
from protocol.registry.seat import LIFE_FACT
from protocol.timer import Timer

STORE_ROLE = "store"
DIRECTORY_ROLE = "directory"
_DEFAULT_CAPACITY = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Immutable snapshot of the membership."""

    nodes: tuple[StoreNode, ...] = ()
    directory: str = ""
    """host:port of the directory's gRPC service; empty = there is no directory."""
    placement: Placement = field(default_factory=lambda: Placement({}))

    @classmethod
    def of(cls, nodes: Iterable[StoreNode], directory: str = "") -> View:
        by_id = {node.node_id: node for node in nodes}
        placement = Placement({node.node_id: node.capacity for node in by_id.values()})
        return cls(tuple(by_id[node_id] for node_id in placement.ids), directory, placement)

    def ranked(self, heads: Sequence[BlockKey]) -> list[list[StoreNode]]:
        """Returns all nodes for each chain head, home first. Raises NoWorker if there is no node."""
        if not self.nodes:
            raise NoWorker("the cluster has no store node")
        ranks = self.placement.ranked(heads)
        return [[self.nodes[place] for place in places] for places in ranks]

    def by_id(self, node_id: str) -> StoreNode | None:
        return next((node for node in self.nodes if node.node_id == node_id), None)


class Cluster:
    """Membership that follows a registry in the backstage loop, or consists of a single node."""

    def __init__(self, means: Means) -> None:
        self.view = View()
        self.known = threading.Event()
        """Set once the first answer has arrived."""
        self._means = means
        self._host = host_identity()
        self._members = KnownMembers()
        self._nodes: dict[tuple[str, str, str], StoreNode] = {}
        """Nodes by `_incarnation`: another incarnation is another node."""

    def know(self, address: str) -> None:
        """Uses a single node, without a registry."""
        self.view = View.of([StoreNode(address, address, self._means)])
        self.known.set()

    async def follow(self, registry: Registry) -> None:
        """Follows the registry until cancelled. Runs in the backstage loop."""
        timer = Timer(lambda: self._expire(timer), time.monotonic)
        try:
            async for members in registry.watch():
                self._members.update(members, time.monotonic())
                self._show()
                timer.set(self._members.due_at)
        finally:
            timer.set(None)
            await asyncio.shield(registry.close())

    def close(self) -> None:
        for node in [*self.view.nodes, *self._nodes.values()]:
            node.forget()

    def _expire(self, timer: Timer) -> None:
        self._members.expire(time.monotonic())
        self._show()
        timer.set(self._members.due_at)

    def _show(self) -> None:
        members = list(self._members.members.values())
        before = self._nodes
        self._nodes = {
            _incarnation(member): before.get(_incarnation(member)) or self._node(member)
            for member in members
            if member.role == STORE_ROLE
        }
        directories = [m.endpoint.rpc_address for m in members if m.role == DIRECTORY_ROLE]
        self.view = View.of(self._nodes.values(), min(directories, default=""))
        self.known.set()
        for gone in before.keys() - self._nodes.keys():
            before[gone].forget()

    def _node(self, member: Member) -> StoreNode:
        return StoreNode(
            member.instance_id,
            member.endpoint.rpc_address,
            self._means,
            capacity=capacity_of(member),
            here=member.endpoint.host == self._host,
        )


def capacity_of(member: Member) -> float:
    """Returns the capacity that a node has published, or a common default."""
    text = member.facts.get("dram", "")
    return float(text) if text.isdecimal() and int(text) else _DEFAULT_CAPACITY


def nearest(nodes: Iterable[StoreNode]) -> Iterator[StoreNode]:
    """Sorts nodes: this host's first, then those with the fewest calls of this client in flight; resting nodes last."""
    yield from sorted(nodes, key=lambda node: (node.resting, not node.is_near, node.in_flight))


def _incarnation(member: Member) -> tuple[str, str, str]:
    """Returns the identity of a node's process. A process that rejoins because the registry has forgotten it has a
    later epoch but the same identity, so its calls in flight go on."""
    life = member.facts.get(LIFE_FACT, str(member.endpoint.epoch))
    return member.instance_id, life, member.endpoint.rpc_address
