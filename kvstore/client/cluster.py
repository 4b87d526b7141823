"""Membership of the store nodes, and calls to the whole cluster: to every node, and to the directory.

Readers see one immutable `ClusterView`, replaced as a whole when the membership changes. An unreachable registry
changes nothing. A node that does not answer a call to every node becomes an error only after all the others were
called. The directory is the slow way to find a key. Does not know where a key is stored.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from moonserve.kvstore.client.node_access.deadline import Deadline
from moonserve.kvstore.client.node_access.node import ClientResources, StoreNode, Stub
from moonserve.kvstore.client.placement import ClusterView
from moonserve.kvstore.wire import DIRECTORY_ROLE, STORE_ROLE
from moonserve.protocol.errors import DeadlineExceeded, MoonserveError, NoWorker, PeerLost
from moonserve.protocol.kv_blocks import BlockKey, pack_keys
from moonserve.protocol.membership.registry import Member, MemberView, Registry
from moonserve.protocol.membership.registry.lease import INCARNATION_FACT
from moonserve.protocol.pb import directory_pb2, directory_pb2_grpc, kvstore_pb2
from moonserve.protocol.process.event_loop import Timer
from moonserve.protocol.process.machine import host_identity

_DEFAULT_CAPACITY = 1.0


class Cluster:
    """Membership that follows a registry in the background loop, or consists of a single node."""

    def __init__(self, resources: ClientResources) -> None:
        self.view = ClusterView()
        self.is_known = threading.Event()
        """Set once the first answer has arrived."""
        self._resources = resources
        self._host = host_identity()
        self._members = MemberView()
        self._nodes: dict[tuple[str, str, str], StoreNode] = {}
        """Nodes by `_incarnation`: another incarnation is another node."""

    def use_single_node(self, address: str) -> None:
        """Uses a single node, without a registry."""
        self.view = ClusterView.of([StoreNode(address, address, self._resources)])
        self.is_known.set()

    async def follow(self, registry: Registry) -> None:
        """Follows the registry until cancelled. Runs in the background loop."""
        timer = Timer(lambda: self._expire(timer), time.monotonic)
        try:
            async for members in registry.watch():
                self._members.update(members, time.monotonic())
                self._publish_view(timer)
        finally:
            timer.set(None)
            await asyncio.shield(registry.close())

    def close(self) -> None:
        for node in [*self.view.nodes, *self._nodes.values()]:
            node.detach_for_good()

    def _expire(self, timer: Timer) -> None:
        self._members.expire(time.monotonic())
        self._publish_view(timer)

    def _publish_view(self, timer: Timer) -> None:
        members = list(self._members.members.values())
        before = self._nodes
        self._nodes = {
            _incarnation(member): before.get(_incarnation(member)) or self._node(member)
            for member in members
            if member.role == STORE_ROLE
        }
        directories = [m.endpoint.rpc_address for m in members if m.role == DIRECTORY_ROLE]
        self.view = ClusterView.of(self._nodes.values(), min(directories, default=""))
        self.is_known.set()
        for gone in before.keys() - self._nodes.keys():
            before[gone].detach_for_good()
        timer.set(self._members.due_at)

    def _node(self, member: Member) -> StoreNode:
        return StoreNode(
            member.instance_id,
            member.endpoint.rpc_address,
            self._resources,
            capacity=capacity_of(member),
            here=member.endpoint.host == self._host,
        )


def capacity_of(member: Member) -> float:
    """Returns the capacity that a node has published, or a common default."""
    text = member.facts.get("dram", "")
    return float(text) if text.isdecimal() and int(text) else _DEFAULT_CAPACITY


def _incarnation(member: Member) -> tuple[str, str, str]:
    """Returns the identity of a node's process. A process that rejoins because the registry has forgotten it has a
    later epoch but the same identity, so its calls in flight go on."""
    life = member.facts.get(INCARNATION_FACT, str(member.endpoint.epoch))
    return member.instance_id, life, member.endpoint.rpc_address


# Calls to every node, and over gRPC in the background loop to the directory

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStats:
    """Statistics of one node, or their sum over several; sizes in bytes."""

    capacity_bytes: int = 0
    free_bytes: int = 0
    held_bytes: int = 0
    leased_bytes: int = 0
    reserved_bytes: int = 0
    num_objects: int = 0
    disk_limit_bytes: int = 0
    disk_live_bytes: int = 0
    num_on_disk: int = 0
    metadata_bytes: int = 0

    def __add__(self, other: "NodeStats") -> "NodeStats":
        return NodeStats(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in _FIELDS})

    @classmethod
    def of(cls, reply: kvstore_pb2.StoreStatsReply) -> "NodeStats":
        return cls(**{each.name: getattr(reply, each.name) for each in _FIELDS})


_FIELDS = fields(NodeStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Statistics of the nodes that answered, and of this client."""

    nodes: Mapping[str, NodeStats]
    counters: Mapping[str, Mapping[str, int]]
    """Counters of each node since its start."""
    unreachable: tuple[str, ...]
    client: Mapping[str, int]
    """This client's own event counts."""

    @property
    def total(self) -> NodeStats:
        return sum(self.nodes.values(), NodeStats())


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node as this client sees it."""

    node_id: str
    address: str
    near: bool
    """True if the node's memory is mapped here, or is worth trying to map."""
    resting: bool
    """True if the node did not answer and is not called until it does."""


def call_all(
    nodes: Sequence[StoreNode],
    method: Callable[[Stub], Callable[..., T]],
    request: Any,
    deadline: Deadline,
) -> tuple[dict[str, T], dict[str, MoonserveError]]:
    """Calls each node, one after the other. Returns the replies and the errors, both by node id."""
    replies: dict[str, T] = {}
    errors: dict[str, MoonserveError] = {}
    for left, node in zip(range(len(nodes), 0, -1), nodes, strict=True):
        attempt = deadline.half_left() if left > 1 else deadline
        try:
            replies[node.node_id] = node.call(method, request, attempt)
        except (PeerLost, DeadlineExceeded) as error:
            if attempt.was_ample():
                node.mark_lost(error)
            errors[node.node_id] = error
    return replies, errors


def call_all_or_raise(
    nodes: Sequence[StoreNode],
    method: Callable[[Stub], Callable[..., T]],
    request: Any,
    deadline: Deadline,
) -> Iterable[T]:
    """Calls each node, as `call_all`. Raises the first error after all nodes were called."""
    replies, errors = call_all(nodes, method, request, deadline)
    for error in errors.values():
        raise error
    return replies.values()


def new_removal_id() -> int:
    """Returns an id for a removal of all replicas: the same at every node, and never used again."""
    return secrets.randbits(63) + 1


def locate_by_directory(
    resources: ClientResources, view: ClusterView, keys: Sequence[BlockKey], deadline: Deadline
) -> list[list[StoreNode]]:
    """Returns the nodes that hold each key, as far as the directory knows. Raises NoWorker without one, PeerLost."""
    request = directory_pb2.LocateRequest(keys=pack_keys(keys))
    reply = _call_directory(resources, view, lambda stub: stub.Locate, request, deadline)
    nodes = [view.by_id(endpoint.instance_id) for endpoint in reply.nodes]
    return [[node for place in holders.nodes if (node := nodes[place]) is not None] for holders in reply.holders]


def change_replica(
    resources: ClientResources, view: ClusterView, keys: Sequence[BlockKey], num_replicas: int, deadline: Deadline
) -> directory_pb2.ChangeReplicaReply:
    """Sets the number of replicas of the keys. Raises NoWorker without a directory, PeerLost, InvalidRequest."""
    request = directory_pb2.ChangeReplicaRequest(keys=pack_keys(keys), num_replicas=num_replicas)
    reply = _call_directory(resources, view, lambda stub: stub.ChangeReplica, request, deadline)
    assert isinstance(reply, directory_pb2.ChangeReplicaReply)
    return reply


def _call_directory(
    resources: ClientResources,
    view: ClusterView,
    method: Callable[[Any], Any],
    request: Any,
    deadline: Deadline,
) -> Any:
    if not view.directory:
        raise NoWorker("the cluster has no directory")
    left_s = deadline.left_s()

    async def call() -> Any:
        stub = directory_pb2_grpc.DirectoryStub(resources.channels.to(view.directory))
        return await resources.channels.call(method(stub), request, timeout_s=left_s)

    return resources.background.run(call(), left_s)
