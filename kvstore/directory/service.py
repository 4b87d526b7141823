"""The directory's calls: questions to the index, and wishes about replicas."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import grpc.aio

from kvstore.directory.follower import Follower, Following
from kvstore.replication.shell import Replicator
from protocol.errors import InvalidRequest
from protocol.ids import InstanceId
from protocol.keys import KEY_BYTES, BlockKey, unpack_keys
from protocol.pb import common_pb2, directory_pb2, directory_pb2_grpc, kvstore_pb2

TIERS = {True: kvstore_pb2.STORE_TIER_MEMORY, False: kvstore_pb2.STORE_TIER_DISK}

Context = grpc.aio.ServicerContext[Any, Any]


class DirectoryService(directory_pb2_grpc.DirectoryServicer):
    """Questions are answered without awaiting."""

    def __init__(self, following: Following, replicator: Replicator) -> None:
        self.counters: Counter[str] = Counter()
        self._following = following
        self._directory = following.directory
        self._replicator = replicator

    async def Locate(
        self, request: directory_pb2.LocateRequest, context: Context
    ) -> directory_pb2.LocateReply:
        self.counters["lookups"] += 1
        reply = directory_pb2.LocateReply()
        nodes = _Nodes(self._following, reply.nodes)
        for key in _keys(request.keys):
            holders = reply.holders.add()
            for node, in_memory in self._directory.locate(key):
                number = nodes.number(node)
                if number is not None:
                    holders.nodes.append(number)
                    holders.tiers.append(TIERS[in_memory])
        return reply

    async def MatchPrefix(
        self, request: directory_pb2.MatchPrefixRequest, context: Context
    ) -> directory_pb2.MatchPrefixReply:
        self.counters["lookups"] += 1
        _check(request.keys)
        reply = directory_pb2.MatchPrefixReply()
        nodes = _Nodes(self._following, reply.nodes)
        for node, run in self._directory.match(request.keys).items():
            if nodes.number(node) is not None:
                reply.lengths.append(run.length)
                reply.memory_lengths.append(run.in_memory)
        return reply

    async def GetNodes(
        self, request: directory_pb2.GetNodesRequest, context: Context
    ) -> directory_pb2.GetNodesReply:
        return directory_pb2.GetNodesReply(
            nodes=[self._view(f) for _, f in sorted(self._following.followers.items())],
            num_keys=len(self._directory),
            memory_bytes=self._directory.table.nbytes,
        )

    async def ChangeReplica(
        self, request: directory_pb2.ChangeReplicaRequest, context: Context
    ) -> directory_pb2.ChangeReplicaReply:
        keys = _keys(request.keys)
        if request.num_replicas < 1:
            raise InvalidRequest("a key has at least one replica; remove it instead")
        changed = await self._replicator.change(keys, request.num_replicas)
        return directory_pb2.ChangeReplicaReply(**asdict(changed))

    def _view(self, follower: Follower) -> directory_pb2.StoreNodeView:
        name = InstanceId(follower.member.instance_id)
        num_objects = self._directory.num_blocks(name)
        return directory_pb2.StoreNodeView(
            endpoint=follower.endpoint or _endpoint_of(follower),
            lean_address=follower.described.lean_address,
            lean_unix_address=follower.described.lean_unix_address,
            num_objects=num_objects,
            num_on_disk=num_objects - self._directory.num_in_memory(name),
            free_bytes=follower.stats.free_bytes,
            capacity_bytes=follower.stats.capacity_bytes,
            draining=follower.stats.draining,
            in_step=follower.in_step,
            last_heard_s=follower.silence_s,
        )


class _Nodes:
    """The nodes that a reply names, each once."""

    def __init__(self, following: Following, named: Any) -> None:
        self._following = following
        self._named = named
        self._numbers: dict[InstanceId, int | None] = {}

    def number(self, node: InstanceId) -> int | None:
        """Its place in the reply; None when nobody could reach it yet."""
        if node not in self._numbers:
            self._numbers[node] = self._name(node)
        return self._numbers[node]

    def _name(self, node: InstanceId) -> int | None:
        endpoint = self._following.endpoint(node)
        if endpoint is None:
            return None
        self._named.append(endpoint)
        return len(self._named) - 1


def _endpoint_of(follower: Follower) -> common_pb2.Endpoint:
    """From the registry, for a node that has not answered yet."""
    member = follower.member
    return common_pb2.Endpoint(
        instance_id=member.instance_id,
        rpc_address=follower.rpc_address,
        host=member.endpoint.host,
    )


def _check(packed_keys: bytes) -> None:
    if len(packed_keys) % KEY_BYTES:
        raise InvalidRequest(f"keys have {KEY_BYTES} bytes each", param="keys")


def _keys(packed_keys: bytes) -> list[BlockKey]:
    _check(packed_keys)
    return unpack_keys(packed_keys)
