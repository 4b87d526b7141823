"""Registry in Redis: its Lua scripts, each one atomic step, and their callers.

Leases end by the server's clock. After a Redis restarts empty, `renew` raises StaleLease and the members join again
(`registry_lease`). Keyspace notifications are not used, since servers disable them by default. Watchers subscribe to a
channel of changes and also poll every `poll_s` for leases that expired.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from redis.asyncio.client import PubSub

from moonserve.protocol.errors import PeerError, Unauthenticated
from moonserve.protocol.membership.registry import (
    TTL_S,
    Member,
    check_join,
    check_ttl,
    lease_table,
    redis_client,
    redis_url,
)
from moonserve.protocol.membership.registry.redis_client import cancellable, translate_redis_errors, with_deadline
from moonserve.protocol.request import Endpoint

log = logging.getLogger(__name__)

T = TypeVar("T")

PREFIX = "moonserve"
DEADLINE_S = 2.0
"""Deadline of a call. It is below RENEW_EVERY_S, so that one lost call does not cost two renewals."""
POLL_S = 2.0
"""Longest delay after which a watcher notices an expired lease; short compared to TTL_S."""
RETRY_S = 0.5

# Keys of the scripts, under a prefix per cluster:
# - `…:member:<id>` hash of `owner`, `epoch`, `member` (JSON); it expires with its lease (PX);
# - `…:members` set of the ids that may have a member, so that no script scans the key space;
# - `…:epochs` hash of the last epoch of each id; it never expires;
# - `…:changed` channel with a message after each change by a script. An expiry sends no message.
#
# Epochs remain strings of digits, because Lua's numbers are doubles, exact up to 2**53 only.

# KEYS: member, members, epochs, changed. ARGV: id, owner, last epoch known to the joiner, ttl in ms, JSON.
# Returns {1, epoch} or {0, ms left, JSON of the holder}. The new epoch is above the id's last one, the joiner's, and
# the time in ns. A server that lost its memory only has the joiner's epoch and the time.
JOIN = """
local function higher(a, b)
  if #a ~= #b then return #a > #b and a or b end
  return a > b and a or b
end
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[2] then
  return {0, redis.call('PTTL', KEYS[1]), redis.call('HGET', KEYS[1], 'member')}
end
local time = redis.call('TIME')
local now = time[1] .. string.format('%06d', time[2]) .. '000'
local last = redis.call('HGET', KEYS[3], ARGV[1]) or '0'
redis.call('HSET', KEYS[3], ARGV[1], higher(higher(last, ARGV[3]), now))
redis.call('HINCRBY', KEYS[3], ARGV[1], 1)
local epoch = redis.call('HGET', KEYS[3], ARGV[1])
redis.call('HSET', KEYS[1], 'owner', ARGV[2], 'epoch', epoch, 'member', ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('PUBLISH', KEYS[4], ARGV[1])
return {1, epoch}
"""

# KEYS: member. ARGV: epoch, ttl in ms. Returns the holder's epoch; nil if there is none.
RENEW = """
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return epoch
"""

# KEYS: member, members, changed. ARGV: id, epoch.
LEAVE = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('PUBLISH', KEYS[3], ARGV[1])
return 1
"""

# KEYS: members, changed. ARGV: prefix of the member keys. Returns epoch, JSON, epoch, JSON, …
# The first caller that finds an expired lease notifies the other watchers.
MEMBERS = """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local entry = redis.call('HMGET', ARGV[1] .. id, 'epoch', 'member')
  if entry[1] then
    found[#found + 1] = entry[1]
    found[#found + 1] = entry[2]
  else
    redis.call('SREM', KEYS[1], id)
    redis.call('PUBLISH', KEYS[2], id)
  end
end
return found
"""


class RedisRegistry:
    """Registry in Redis. `registry.redis_url` describes `url`; each cluster has its own `prefix`."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = PREFIX,
        deadline_s: float = DEADLINE_S,
        poll_s: float = POLL_S,
    ) -> None:
        self._address = redis_url.parse_redis_url(url)
        self._prefix = prefix
        self._deadline_s = deadline_s
        self._poll_s = poll_s
        self._client = redis_client.connect_redis(self._address, deadline_s)
        self._join = self._client.register_script(JOIN)
        self._renew = self._client.register_script(RENEW)
        self._leave = self._client.register_script(LEAVE)
        self._members = self._client.register_script(MEMBERS)

    async def join(self, member: Member, *, ttl_s: float = TTL_S) -> Member:
        check_join(member, ttl_s)
        keys = [self._key_of(member), self._key("members"), self._key("epochs")]
        epoch, text = str(member.endpoint.epoch), _to_json(member)
        args = [member.instance_id, member.owner, epoch, _ms(ttl_s), text]
        reply = await self._bounded(self._join(keys=[*keys, self._key("changed")], args=args))
        if reply[0]:
            return lease_table.with_epoch(member, int(reply[1]))
        holder = _from_json(reply[2])
        raise lease_table.held_error(holder.endpoint.rpc_address, member, reply[1] / 1000)

    async def renew(self, member: Member, *, ttl_s: float = TTL_S) -> None:
        check_ttl(ttl_s)
        epoch = member.endpoint.epoch
        args = [str(epoch), _ms(ttl_s)]
        holder = await self._bounded(self._renew(keys=[self._key_of(member)], args=args))
        if holder is None:
            raise lease_table.ended_error(member.instance_id)
        if int(holder) != epoch:
            raise lease_table.superseded_error(member.instance_id, epoch, int(holder))

    async def leave(self, member: Member) -> None:
        keys = [self._key_of(member), self._key("members"), self._key("changed")]
        args = [member.instance_id, str(member.endpoint.epoch)]
        await self._bounded(self._leave(keys=keys, args=args))

    async def members(self) -> list[Member]:
        keys, args = [self._key("members"), self._key("changed")], [self._key("member:")]
        reply = await self._bounded(self._members(keys=keys, args=args))
        epochs, texts = map(int, reply[::2]), map(_from_json, reply[1::2])
        found = [lease_table.with_epoch(member, epoch) for epoch, member in zip(epochs, texts, strict=True)]
        return sorted(found, key=lambda member: member.instance_id)

    async def watch(self) -> AsyncIterator[list[Member]]:
        seen, is_lost = None, False
        while True:
            try:
                async with self._changes() as changes:
                    while True:
                        members, is_lost = await self.members(), False
                        if members != seen:
                            seen = members
                            yield members
                        await self._next(changes)
            except (PeerError, Unauthenticated) as error:
                if seen is None and isinstance(error, Unauthenticated):
                    raise  # a watcher that has seen members keeps trying, e.g. after a change of password
                if not is_lost:
                    log.warning("lost the registry at %s, watching it again: %s", self._address, error)
                is_lost = True
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        await redis_client.close_redis(self._client)

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
        with cancellable(), translate_redis_errors():
            await changes.get_message(timeout=self._poll_s)

    async def _bounded(self, call: Awaitable[T]) -> T:
        return await with_deadline(call, self._deadline_s)

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
        raise PeerError(f"the registry has a malformed member, which cannot be read: {error!r}") from error
