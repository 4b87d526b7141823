"""gRPC service of the embedded registry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc.aio

from protocol.pb import registry_pb2, registry_pb2_grpc
from protocol.registry.base import Member
from protocol.registry.embedded import EmbeddedRegistry
from protocol.wire import from_message, to_message

Context = grpc.aio.ServicerContext[Any, Any]


class RegistryService(registry_pb2_grpc.RegistryServicer):
    """gRPC service `Registry`. All calls except `Watch` are answered without awaiting."""

    def __init__(self, registry: EmbeddedRegistry) -> None:
        self._registry = registry

    async def Join(self, request: registry_pb2.RegistryJoinRequest, context: Context) -> registry_pb2.RegistryJoinReply:
        member = await self._registry.join(from_message(Member, request.member), ttl_s=request.ttl_s)
        return registry_pb2.RegistryJoinReply(member=to_message(registry_pb2.Member, member))

    async def Renew(
        self, request: registry_pb2.RegistryRenewRequest, context: Context
    ) -> registry_pb2.RegistryRenewReply:
        self._registry.renew_epoch(request.instance_id, request.epoch, request.ttl_s)
        return registry_pb2.RegistryRenewReply()

    async def Leave(
        self, request: registry_pb2.RegistryLeaveRequest, context: Context
    ) -> registry_pb2.RegistryLeaveReply:
        self._registry.leave_epoch(request.instance_id, request.epoch)
        return registry_pb2.RegistryLeaveReply()

    async def Members(
        self, request: registry_pb2.RegistryMembersRequest, context: Context
    ) -> registry_pb2.RegistryMembers:
        return _shown(*self._registry.now())

    async def Watch(
        self, request: registry_pb2.RegistryWatchRequest, context: Context
    ) -> AsyncIterator[registry_pb2.RegistryMembers]:
        seen = request.seen_version
        while True:
            seen, members = await self._registry.after(seen)
            yield _shown(seen, members)


def _shown(version: int, members: Iterable[Member]) -> registry_pb2.RegistryMembers:
    made = [to_message(registry_pb2.Member, each) for each in members]
    return registry_pb2.RegistryMembers(version=version, members=made)
