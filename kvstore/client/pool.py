"""Calls to the whole cluster: to every node, and to the directory.

Every node is called; a node that does not answer becomes an error only after all the others were called. The directory
is called over gRPC in the backstage loop. It is the slow way to find a key, and sets the number of replicas of a key.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from kvstore.client.cluster import View
from kvstore.client.deadline import Deadline
from kvstore.client.node import Means, StoreNode, Stub
from protocol.errors import DeadlineExceeded, MoonserveError, NoWorker, PeerLost
from protocol.keys import BlockKey, pack_keys
from protocol.pb import directory_pb2, directory_pb2_grpc, kvstore_pb2

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

    def __add__(self, other: NodeStats) -> NodeStats:
        return NodeStats(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in _FIELDS})

    @classmethod
    def of(cls, reply: kvstore_pb2.StoreStatsReply) -> NodeStats:
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


def ask_all(
    nodes: Sequence[StoreNode],
    method: Callable[[Stub], Callable[..., T]],
    request: Any,
    deadline: Deadline,
) -> tuple[dict[str, T], dict[str, MoonserveError]]:
    """Calls each node, one after the other. Returns the replies and the errors, both by node id."""
    replies: dict[str, T] = {}
    errors: dict[str, MoonserveError] = {}
    for left, node in zip(range(len(nodes), 0, -1), nodes, strict=True):
        attempt = deadline.half() if left > 1 else deadline
        try:
            replies[node.node_id] = node.call(method, request, attempt)
        except (PeerLost, DeadlineExceeded) as error:
            if attempt.fair():
                node.lost(error)
            errors[node.node_id] = error
    return replies, errors


def answers_of_all(
    nodes: Sequence[StoreNode],
    method: Callable[[Stub], Callable[..., T]],
    request: Any,
    deadline: Deadline,
) -> Iterable[T]:
    """Calls each node, as `ask_all`. Raises the first error after all nodes were called."""
    replies, errors = ask_all(nodes, method, request, deadline)
    for error in errors.values():
        raise error
    return replies.values()


def new_removal_id() -> int:
    """Returns an id for a removal of all replicas: the same at every node, and never used again."""
    return secrets.randbits(63) + 1


def locate(means: Means, view: View, keys: Sequence[BlockKey], deadline: Deadline) -> list[list[StoreNode]]:
    """Returns the nodes that hold each key, as far as the directory knows. Raises NoWorker without one, PeerLost."""
    request = directory_pb2.LocateRequest(keys=pack_keys(keys))
    reply = _ask(means, view, lambda stub: stub.Locate, request, deadline)
    nodes = [view.by_id(endpoint.instance_id) for endpoint in reply.nodes]
    return [[node for place in holders.nodes if (node := nodes[place]) is not None] for holders in reply.holders]


def change_replica(
    means: Means, view: View, keys: Sequence[BlockKey], num_replicas: int, deadline: Deadline
) -> directory_pb2.ChangeReplicaReply:
    """Sets the number of replicas of the keys. Raises NoWorker without a directory, PeerLost, InvalidRequest."""
    request = directory_pb2.ChangeReplicaRequest(keys=pack_keys(keys), num_replicas=num_replicas)
    reply = _ask(means, view, lambda stub: stub.ChangeReplica, request, deadline)
    assert isinstance(reply, directory_pb2.ChangeReplicaReply)
    return reply


def _ask(
    means: Means,
    view: View,
    method: Callable[[Any], Any],
    request: Any,
    deadline: Deadline,
) -> Any:
    if not view.directory:
        raise NoWorker("the cluster has no directory")
    left_s = deadline.left_s()

    async def call() -> Any:
        stub = directory_pb2_grpc.DirectoryStub(means.channels.to(view.directory))
        return await means.channels.call(method(stub), request, timeout_s=left_s)

    return means.backstage.ask(call(), left_s)
