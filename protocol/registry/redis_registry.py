"""Registry in Redis, by means of Lua scripts (`redis_scripts`).

Leases end by the server's clock. After a Redis restarts empty, `renew` raises StaleLease and the members join again
(`protocol.registry.seat`). Keyspace notifications are not used, since servers disable them by default. Watchers
subscribe to a channel of changes and also poll every `poll_s` for leases that expired.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from redis.asyncio.client import PubSub

from protocol.errors import PeerError, Unauthenticated
from protocol.registry import redis_address, redis_client, redis_scripts, table
from protocol.registry.base import TTL_S, Member, check_join, check_ttl
from protocol.registry.redis_client import bounded, cancellable, translated
from protocol.request import Endpoint

log = logging.getLogger(__name__)

T = TypeVar("T")

PREFIX = "moonserve"
DEADLINE_S = 2.0
"""Deadline of a call. It is below RENEW_EVERY_S, so that one lost call does not cost two renewals."""
POLL_S = 2.0
"""Longest delay after which a watcher notices an expired lease; short compared to TTL_S."""
RETRY_S = 0.5


class RedisRegistry:
    """Registry in Redis. `protocol.registry.redis_address` describes `url`; each cluster has its own `prefix`."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = PREFIX,
        deadline_s: float = DEADLINE_S,
        poll_s: float = POLL_S,
    ) -> None:
        self._address = redis_address.parse(url)
        self._prefix = prefix
        self._deadline_s = deadline_s
        self._poll_s = poll_s
        self._client = redis_client.connect(self._address, deadline_s)
        self._join = self._client.register_script(redis_scripts.JOIN)
        self._renew = self._client.register_script(redis_scripts.RENEW)
        self._leave = self._client.register_script(redis_scripts.LEAVE)
        self._members = self._client.register_script(redis_scripts.MEMBERS)

    async def join(self, member: Member, *, ttl_s: float = TTL_S) -> Member:
        check_join(member, ttl_s)
        keys = [self._key_of(member), self._key("members"), self._key("epochs")]
        epoch, text = str(member.endpoint.epoch), _to_json(member)
        args = [member.instance_id, member.owner, epoch, _ms(ttl_s), text]
        reply = await self._bounded(self._join(keys=[*keys, self._key("changed")], args=args))
        if reply[0]:
            return table.with_epoch(member, int(reply[1]))
        holder = _from_json(reply[2])
        raise table.refused(holder.endpoint.rpc_address, member, reply[1] / 1000)

    async def renew(self, member: Member, *, ttl_s: float = TTL_S) -> None:
        check_ttl(ttl_s)
        epoch = member.endpoint.epoch
        args = [str(epoch), _ms(ttl_s)]
        holder = await self._bounded(self._renew(keys=[self._key_of(member)], args=args))
        if holder is None:
            raise table.ended(member.instance_id)
        if int(holder) != epoch:
            raise table.taken_over(member.instance_id, epoch, int(holder))

    async def leave(self, member: Member) -> None:
        keys = [self._key_of(member), self._key("members"), self._key("changed")]
        args = [member.instance_id, str(member.endpoint.epoch)]
        await self._bounded(self._leave(keys=keys, args=args))

    async def members(self) -> list[Member]:
        keys, args = [self._key("members"), self._key("changed")], [self._key("member:")]
        reply = await self._bounded(self._members(keys=keys, args=args))
        epochs, texts = map(int, reply[::2]), map(_from_json, reply[1::2])
        found = [table.with_epoch(member, epoch) for epoch, member in zip(epochs, texts, strict=True)]
        return sorted(found, key=lambda member: member.instance_id)

    async def watch(self) -> AsyncIterator[list[Member]]:
        seen, away = None, False
        while True:
            try:
                async with self._changes() as changes:
                    while True:
                        members, away = await self.members(), False
                        if members != seen:
                            seen = members
                            yield members
                        await self._next(changes)
            except (PeerError, Unauthenticated) as error:
                if seen is None and isinstance(error, Unauthenticated):
                    raise  # a watcher that has seen members keeps trying, e.g. after a change of password
                if not away:
                    log.warning("watching the registry at %s again: %s", self._address, error)
                away = True
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        await redis_client.close(self._client)

    @contextlib.asynccontextmanager
    async def _changes(self) -> AsyncIterator[PubSub]:
        """Subscribes to changes within the block. Callers read the members after that and so miss no change."""
        changes = self._client.pubsub()
        try:
            await self._bounded(changes.subscribe(self._key("changed")))
            yield changes
        finally:
            await changes.aclose()  # type: ignore[no-untyped-call]  # redis-py

    async def _next(self, changes: PubSub) -> None:
        """Waits for a change, for at most `poll_s`."""
        with cancellable(), translated():
            await changes.get_message(timeout=self._poll_s)

    async def _bounded(self, call: Awaitable[T]) -> T:
        return await bounded(call, self._deadline_s)

    def _key_of(self, member: Member) -> str:
        return self._key(f"member:{member.instance_id}")

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"


def _ms(seconds: float) -> str:
    return str(math.ceil(seconds * 1000))


def _to_json(member: Member) -> str:
    return json.dumps(dataclasses.asdict(member), separators=(",", ":"), sort_keys=True)


def _from_json(text: str) -> Member:
    """Parses a member. Raises PeerError if the text is malformed; fields of later releases are ignored."""
    try:
        entry: dict[str, Any] = json.loads(text)
        endpoint: dict[str, Any] = entry["endpoint"]
        return Member(
            endpoint=Endpoint(
                instance_id=str(endpoint["instance_id"]),
                epoch=int(endpoint["epoch"]),
                rpc_address=str(endpoint["rpc_address"]),
                transfer_address=str(endpoint["transfer_address"]),
                host=str(endpoint["host"]),
            ),
            role=str(entry["role"]),
            owner=str(entry["owner"]),
            facts={str(name): str(value) for name, value in entry["facts"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PeerError(f"the registry holds a member that cannot be read: {error!r}") from error
