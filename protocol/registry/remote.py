"""Client of the embedded registry of another process, over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from protocol.errors import PeerError
from protocol.pb import registry_pb2, registry_pb2_grpc
from protocol.registry.base import TTL_S, Member
from protocol.rpc import Channels
from protocol.tls import Certificates
from protocol.wire import from_message, to_message

log = logging.getLogger(__name__)

DEADLINE_S = 2.0
"""Deadline of a call. It is below RENEW_EVERY_S, so that one lost call does not cost two renewals."""
RETRY_S = 0.5


class RemoteRegistry:
    """Registry that `protocol.registry.service` serves at `address` (host:port)."""

    def __init__(
        self,
        address: str,
        cluster_token: str,
        tls: Certificates | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        channels: Channels | None = None,
    ) -> None:
        self._address = address
        self._deadline_s = deadline_s
        self._channels = channels or Channels(cluster_token, tls)
        self._stub = registry_pb2_grpc.RegistryStub(self._channels.to(address))

    async def join(self, member: Member, *, ttl_s: float = TTL_S) -> Member:
        request = registry_pb2.RegistryJoinRequest(member=to_message(registry_pb2.Member, member), ttl_s=ttl_s)
        reply = await self._channels.call(self._stub.Join, request, timeout_s=self._deadline_s)
        return from_message(Member, reply.member)

    async def renew(self, member: Member, *, ttl_s: float = TTL_S) -> None:
        request = registry_pb2.RegistryRenewRequest(
            instance_id=member.instance_id, epoch=member.endpoint.epoch, ttl_s=ttl_s
        )
        await self._channels.call(self._stub.Renew, request, timeout_s=self._deadline_s)

    async def leave(self, member: Member) -> None:
        request = registry_pb2.RegistryLeaveRequest(instance_id=member.instance_id, epoch=member.endpoint.epoch)
        await self._channels.call(self._stub.Leave, request, timeout_s=self._deadline_s)

    async def members(self) -> list[Member]:
        request = registry_pb2.RegistryMembersRequest()
        reply = await self._channels.call(self._stub.Members, request, timeout_s=self._deadline_s)
        return _members(reply)

    async def watch(self) -> AsyncIterator[list[Member]]:
        seen, away = 0, False
        while True:
            try:
                async with contextlib.aclosing(self._stream(seen)) as messages:
                    async for message in messages:
                        seen, away = message.version, False
                        yield _members(message)
            except PeerError as error:
                if not away:
                    log.warning("watching the registry at %s again: %s", self._address, error)
                away = True
            await asyncio.sleep(RETRY_S)

    async def _stream(self, seen_version: int) -> AsyncGenerator[registry_pb2.RegistryMembers, None]:
        request = registry_pb2.RegistryWatchRequest(seen_version=seen_version)
        async for message in self._channels.stream(self._stub.Watch, request):
            yield message

    async def close(self) -> None:
        await self._channels.close()


def _members(message: registry_pb2.RegistryMembers) -> list[Member]:
    return [from_message(Member, each) for each in message.members]
