"""RPC service of the directory: queries of the index, and requests to change replicas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import grpc.aio

from kvstore.directory.follower import Following
from kvstore.replication.shell import Replicator
from kvstore.wire import packed_keys_from_wire
from protocol.errors import InvalidRequest
from protocol.keys import BlockKey, unpack_keys
from protocol.pb import directory_pb2, directory_pb2_grpc
from protocol.wire import endpoint_to_wire

Context = grpc.aio.ServicerContext[Any, Any]


class DirectoryService(directory_pb2_grpc.DirectoryServicer):
    """Serves the directory's RPCs. Queries are answered without awaiting."""

    def __init__(self, following: Following, replicator: Replicator) -> None:
        self.counters: Counter[str] = Counter()
        self._following = following
        self._directory = following.directory
        self._replicator = replicator

    async def Locate(self, request: directory_pb2.LocateRequest, context: Context) -> directory_pb2.LocateReply:
        self.counters["lookups"] += 1
        held = [self._directory.holders(key) for key in _keys(request.keys)]
        endpoints = {node: self._following.endpoint(node) for nodes in held for node in nodes}
        # Nodes whose endpoint is not known yet are left out.
        reply = directory_pb2.LocateReply(nodes=[e for e in endpoints.values() if e is not None])
        numbers = {endpoint.instance_id: n for n, endpoint in enumerate(reply.nodes)}
        for nodes in held:
            reply.holders.add(nodes=[numbers[node] for node in nodes if node in numbers])
        return reply

    async def GetNodes(self, request: directory_pb2.GetNodesRequest, context: Context) -> directory_pb2.GetNodesReply:
        nodes = [
            directory_pb2.StoreNodeView(
                # A node that has not answered yet has its endpoint from the registry.
                endpoint=each.endpoint or endpoint_to_wire(each.member.endpoint),
                in_step=each.view().in_step,
                last_heard_s=each.silence_s,
            )
            for _, each in sorted(self._following.followers.items())
        ]
        return directory_pb2.GetNodesReply(
            nodes=nodes,
            num_keys=len(self._directory),
            memory_bytes=self._directory.table.nbytes,
        )

    async def ChangeReplica(
        self, request: directory_pb2.ChangeReplicaRequest, context: Context
    ) -> directory_pb2.ChangeReplicaReply:
        keys = _keys(request.keys)
        if request.num_replicas < 1:
            raise InvalidRequest("a key has at least one replica; remove it instead")
        return await self._replicator.change(keys, request.num_replicas)


def _keys(packed_keys: bytes) -> list[BlockKey]:
    return unpack_keys(packed_keys_from_wire(packed_keys))
