"""Calls to the directory: who holds keys, and how many are to. Over gRPC, backstage; the slow way to find a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvstore.client.cluster import View
from kvstore.client.deadline import Deadline
from kvstore.client.node import Means, StoreNode
from protocol.errors import NoWorker
from protocol.keys import BlockKey, pack_keys
from protocol.pb import directory_pb2, directory_pb2_grpc


def locate(
    means: Means, view: View, keys: Sequence[BlockKey], deadline: Deadline
) -> list[list[StoreNode]]:
    """Of each key the nodes that hold it, as far as the directory has heard. Raises NoWorker without one, PeerLost."""
    request = directory_pb2.LocateRequest(keys=pack_keys(keys))
    reply = _ask(means, view, lambda stub: stub.Locate, request, deadline)
    nodes = [view.by_id(endpoint.instance_id) for endpoint in reply.nodes]
    return [
        [node for place in holders.nodes if (node := nodes[place]) is not None]
        for holders in reply.holders
    ]


def change_replica(
    means: Means, view: View, keys: Sequence[BlockKey], num_replicas: int, deadline: Deadline
) -> directory_pb2.ChangeReplicaReply:
    """Raises NoWorker without a directory, PeerLost, InvalidRequest."""
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
