"""Creates the Registry that `--registry` describes: a client of another process's embedded registry, over gRPC, or
Redis.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from moonserve.protocol.errors import ConfigError, PeerError
from moonserve.protocol.membership.registry import TTL_S, Member, Registry, redis_url
from moonserve.protocol.pb import registry_pb2, registry_pb2_grpc
from moonserve.protocol.process.tls import Certificates
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import from_message, to_message

log = logging.getLogger(__name__)

EMBEDDED_SCHEME = "moonserve"

DEADLINE_S = 2.0
"""Deadline of a call. It is below RENEW_EVERY_S, so that one lost call does not cost two renewals."""
RETRY_S = 0.5


class RemoteRegistry:
    """Client, over gRPC, of the embedded registry that another process serves at `address` (host:port)."""

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
        seen, is_lost = 0, False
        while True:
            try:
                async with contextlib.aclosing(self._stream(seen)) as messages:
                    async for message in messages:
                        seen, is_lost = message.version, False
                        yield _members(message)
            except PeerError as error:
                if not is_lost:
                    log.warning("lost the registry at %s, watching it again: %s", self._address, error)
                is_lost = True
            await asyncio.sleep(RETRY_S)

    async def _stream(self, seen_version: int) -> AsyncGenerator[registry_pb2.RegistryMembers, None]:
        request = registry_pb2.RegistryWatchRequest(seen_version=seen_version)
        async for message in self._channels.stream(self._stub.Watch, request):
            yield message

    async def close(self) -> None:
        await self._channels.close()


def _members(message: registry_pb2.RegistryMembers) -> list[Member]:
    return [from_message(Member, each) for each in message.members]


def connect_registry(url: str, *, cluster_token: str, tls: Certificates | None = None) -> Registry:
    """Returns the Registry for `url`. It connects on first use, so that a process can start without its registry.

    `host:port` or `moonserve://host:port` is the process with the embedded registry. Other schemes are Redis, whose URL
    determines whether it uses TLS. Raises ConfigError, which never quotes a password.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return RemoteRegistry(_address(url), cluster_token, tls)
    if scheme == EMBEDDED_SCHEME:
        return RemoteRegistry(_address(rest), cluster_token, tls)
    if scheme in redis_url.REDIS_SCHEMES:
        # Importing the Redis client takes a fifth of a process's import time, and few clusters use Redis.
        from moonserve.protocol.membership.registry.redis_registry import RedisRegistry

        return RedisRegistry(url)
    raise ConfigError(
        f"--registry has the unknown scheme {scheme!r}; write host:port or moonserve://host:port for the process "
        f"with the embedded registry, or for a Redis {redis_url.REDIS_URL_FORMS}"
    )


def _address(text: str) -> str:
    host, _, port = text.rstrip("/").rpartition(":")
    if not host or "@" in host or "/" in host or not (port.isascii() and port.isdigit()):
        raise ConfigError("--registry must be host:port, moonserve://host:port or the URL of a Redis")
    return f"{host}:{port}"
