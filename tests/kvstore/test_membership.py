"""A node in a cluster: what it announces is what its directory knows, across a restart too."""

from __future__ import annotations

import asyncio
from typing import Any

from kvstore.directory import Directory
from protocol.ids import InstanceId
from protocol.keys import pack_keys, unpack_keys
from protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc
from protocol.rpc import RpcServer
from tests.kvstore.nodes import TOKEN, chain_of, connected, key, remove, running_node, within
from tests.patience import PATIENCE_S

BLOCK = 64 * 1024
STORE = InstanceId("store-0")


class IndexingConductor(conductor_pb2_grpc.ConductorServicer):
    """The part of a conductor that members talk to, over a real directory."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.registrations: list[conductor_pb2.RegisterRequest] = []
        self.loads: list[conductor_pb2.Load] = []
        self._changed = asyncio.Condition()

    async def until(self, holds: Any) -> None:
        async with self._changed:
            await within(PATIENCE_S, self._changed.wait_for(holds))

    async def Register(self, request: conductor_pb2.RegisterRequest, context: Any) -> conductor_pb2.RegisterReply:
        self.registrations.append(request)
        return conductor_pb2.RegisterReply(heartbeat_interval_s=0.2, lease_s=5.0)

    async def Heartbeat(self, request: conductor_pb2.HeartbeatRequest, context: Any) -> conductor_pb2.HeartbeatReply:
        events = request.events
        parents = unpack_keys(events.added_parents)
        applied = self.directory.apply(
            InstanceId(request.instance_id),
            request.epoch,
            zip(unpack_keys(events.added_keys), parents, strict=True),
            unpack_keys(events.removed_keys),
            events.first_seq,
            events.next_seq,
            events.snapshot,
        )
        self.loads.append(request.load)
        async with self._changed:
            self._changed.notify_all()
        return conductor_pb2.HeartbeatReply(known=True, resync=not applied)

    async def Deregister(self, request: conductor_pb2.DeregisterRequest, context: Any) -> conductor_pb2.DeregisterReply:
        self.directory.drop(InstanceId(request.instance_id))
        return conductor_pb2.DeregisterReply()


async def test_a_node_announces_its_blocks_and_its_next_life_announces_none() -> None:
    conductor = IndexingConductor()
    server = RpcServer(TOKEN)
    conductor_pb2_grpc.add_ConductorServicer_to_server(conductor, server.grpc)
    address = await server.start("127.0.0.1", 0)
    flags = ("--dram", "1MiB", "--conductor", address)
    keys = [key(n) for n in range(4)]

    def num_held() -> int:
        return conductor.directory.match(pack_keys(keys)).get(STORE, 0)

    try:
        with running_node(*flags) as node:
            async with connected(node.rpc_address) as (client, transfer, store):
                local = transfer.allocate(4 * BLOCK)
                await client.put(store, *chain_of(local, range(4), BLOCK))
                await conductor.until(lambda: num_held() == 4)
                await remove(client, store, [keys[2]])
                await conductor.until(lambda: num_held() == 2)
                await conductor.until(lambda: conductor.loads[-1].held_blocks == 3)
            node.kill()
        with running_node(*flags):
            await conductor.until(lambda: num_held() == 0)
            await conductor.until(lambda: len(conductor.registrations) == 2)
    finally:
        await server.stop(0)
    first, second = conductor.registrations
    assert first.role == second.role == common_pb2.ROLE_STORE
    assert second.endpoint.epoch > first.endpoint.epoch
    assert second.endpoint.transfer_address != first.endpoint.transfer_address
    conductor.directory.validate()
