"""Which store nodes there are, and whom to ask for a key in which order.

Its rule: what others read of it is one immutable `View`, replaced as a whole when the membership changes; a registry
that cannot be reached changes nothing. Does not know whether a key is anywhere.
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
    """The nodes at one time."""

    nodes: tuple[StoreNode, ...] = ()
    directory: str = ""
    """host:port of its gRPC service; empty = there is none."""
    placement: Placement = field(default_factory=lambda: Placement({}))

    @classmethod
    def of(cls, nodes: Iterable[StoreNode], directory: str = "") -> View:
        by_id = {node.node_id: node for node in nodes}
        placement = Placement({node.node_id: node.capacity for node in by_id.values()})
        return cls(tuple(by_id[node_id] for node_id in placement.ids), directory, placement)

    def ranked(self, heads: Sequence[BlockKey]) -> list[list[StoreNode]]:
        """Of each, all nodes, home first. Raises NoWorker when there is none."""
        if not self.nodes:
            raise NoWorker("the cluster has no store node")
        ranks = self.placement.ranked(heads)
        return [[self.nodes[place] for place in places] for places in ranks]

    def by_id(self, node_id: str) -> StoreNode | None:
        return next((node for node in self.nodes if node.node_id == node_id), None)


class Cluster:
    """Follows a registry backstage, or knows a single node."""

    def __init__(self, means: Means) -> None:
        self.view = View()
        self.known = threading.Event()
        """The first answer has come."""
        self._means = means
        self._host = host_identity()
        self._members = KnownMembers()
        self._nodes: dict[tuple[str, str, str], StoreNode] = {}
        """By `_incarnation`: another one is another node."""

    def know(self, address: str) -> None:
        """One node, without a registry."""
        self.view = View.of([StoreNode(address, address, self._means)])
        self.known.set()

    async def follow(self, registry: Registry) -> None:
        """For ever; backstage."""
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
    """From what the node says of itself; all alike when it says nothing."""
    text = member.facts.get("dram", "")
    return float(text) if text.isdecimal() and int(text) else _DEFAULT_CAPACITY


def nearest(nodes: Iterable[StoreNode]) -> Iterator[StoreNode]:
    """Those on this host first, then those that this client keeps least busy; the resting ones last."""
    yield from sorted(nodes, key=lambda node: (node.resting, not node.is_near, node.in_flight))


def _incarnation(member: Member) -> tuple[str, str, str]:
    """A process that joins again, since the registry had forgotten it, has a later epoch and is the same one: calls to
    it that are under way go on."""
    life = member.facts.get(LIFE_FACT, str(member.endpoint.epoch))
    return member.instance_id, life, member.endpoint.rpc_address
