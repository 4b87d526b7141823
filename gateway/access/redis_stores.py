"""API keys and shared limits in the registry's Redis, for gateways on several machines.

Keys, under a prefix per cluster:

- `…:api-keys` hash of digest → JSON of the record;
- `…:api-keys:version` counts the changes, so that a check without changes is one short reply.

A Redis that comes back empty has lost the keys; they are not revoked. Running gateways keep the keys they know and log
an error. Redis must persist its data (`appendonly yes`) for gateways that start later.
"""

import json
from collections.abc import Iterable
from typing import Any

from moonserve.gateway.access.api_key import ApiKey, KeyLimits, from_json
from moonserve.gateway.access.rate_limit_state import DEADLINE_S as LIMIT_DEADLINE_S
from moonserve.gateway.access.rate_limit_state import (
    MINUTE_S,
    PRECISION_S,
    STREAM_TTL_S,
    STREAMS_RETRY_S,
    Verdict,
    verdict,
)
from moonserve.protocol.errors import ConfigError, InvalidRequest, PeerError
from moonserve.protocol.membership.registry import redis_client, redis_url
from moonserve.protocol.membership.registry.redis_client import with_deadline
from moonserve.protocol.membership.registry.redis_registry import DEADLINE_S, PREFIX


class RedisKeyStore:
    """A KeyStore in Redis. Methods raise PeerError (PeerLost if the deadline passes) and Unauthenticated."""

    def __init__(self, url: str) -> None:
        """Prepares a client without connecting. Raises ConfigError if the URL is invalid."""
        self._client: Any = redis_client.connect_redis(redis_url.parse_redis_url(url), DEADLINE_S)
        self._keys, self._version = f"{PREFIX}:api-keys", f"{PREFIX}:api-keys:version"
        self._was_there = False

    async def all(self) -> list[ApiKey]:
        return _parsed(await with_deadline(self._client.hgetall(self._keys), DEADLINE_S))

    async def add(self, key: ApiKey) -> None:
        pipeline = self._client.pipeline(transaction=True)
        pipeline.hset(self._keys, key.digest, json.dumps(key.to_json()))
        await self._commit(pipeline)

    async def revoke(self, key_id: str) -> bool:
        found = [key.digest for key in await self.all() if key.key_id == key_id]
        if not found:
            return False
        pipeline = self._client.pipeline(transaction=True)
        pipeline.hdel(self._keys, *found)
        removed, *_ = await self._commit(pipeline)
        return bool(removed)

    async def version(self) -> bytes:
        """Returns the version of the keys. Raises PeerError if the keys were lost."""
        version: bytes | None = await with_deadline(self._client.get(self._version), DEADLINE_S)
        if version is None and self._was_there:
            raise PeerError("redis has lost the API keys; this gateway keeps the known ones")
        self._was_there = version is not None
        return version or b"0"

    async def close(self) -> None:
        await redis_client.close_redis(self._client)

    async def _commit(self, pipeline: Any) -> list[Any]:
        pipeline.incr(self._version)
        replies: list[Any] = await with_deadline(pipeline.execute(), DEADLINE_S)
        return replies


def _parsed(entries: dict[bytes, bytes]) -> list[ApiKey]:
    try:
        return [from_json(json.loads(text)) for text in entries.values()]
    except (ValueError, InvalidRequest) as error:
        raise ConfigError(f"a key in redis was not written by `moonserve keys`: {error}") from error


_COMMON = f"""
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local limits = {{requests = tonumber(ARGV[1]), tokens = tonumber(ARGV[2]), streams = tonumber(ARGV[3])}}
local function full_at(name)
  return math.max(tonumber(redis.call('HGET', KEYS[1], name) or '0'), now)
end
local function wait(name, amount)
  if limits[name] == nil then return 0 end
  local spare = math.max(0, limits[name] - amount) / limits[name] * {MINUTE_S}
  local seconds = full_at(name) - now - spare
  return seconds > {PRECISION_S} and seconds or 0
end
local function take(name, amount)
  if limits[name] == nil then return end
  local at = full_at(name) + amount / limits[name] * {MINUTE_S}
  redis.call('HSET', KEYS[1], name, string.format('%.17g', at))
  local ms = math.ceil((math.max(full_at('requests'), full_at('tokens')) - now) * 1000) + 1000
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', ms))
end
local function text(number) return string.format('%.17g', number) end
"""

# ARGV: the three limits ('' = none), request id, tokens, ms for which it keeps its place. Returns whether it was
# admitted, then in seconds the wait for each limit and the time until each bucket is full.
_ADMIT = (
    _COMMON
    + f"""
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local waits = {{wait('requests', 1), wait('tokens', tonumber(ARGV[5])), 0}}
if limits.streams ~= nil and redis.call('ZCARD', KEYS[2]) >= limits.streams then
  waits[3] = {STREAMS_RETRY_S}
end
local admitted = math.max(unpack(waits)) == 0
if admitted then
  take('requests', 1)
  take('tokens', tonumber(ARGV[5]))
  redis.call('ZADD', KEYS[2], now + ARGV[6] / 1000, ARGV[4])
  redis.call('PEXPIRE', KEYS[2], ARGV[6])
end
return {{admitted and 1 or 0, text(waits[1]), text(waits[2]), text(waits[3]),
  text(full_at('requests') - now), text(full_at('tokens') - now)}}
"""
)

# ARGV: the three limits, request id, tokens still to take (negative = to give back).
_SETTLE = (
    _COMMON
    + """
take('tokens', tonumber(ARGV[5]))
redis.call('ZREM', KEYS[2], ARGV[4])
"""
)

# KEYS: sorted sets. ARGV: ms, then one request id per set.
_RENEW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
for number, key in ipairs(KEYS) do
  redis.call('ZADD', key, now + ARGV[1] / 1000, ARGV[number + 1])
  redis.call('PEXPIRE', key, ARGV[1])
end
"""


class RedisRateLimits:
    """Accounts of all gateways in Redis. Methods raise PeerError (PeerLost if the deadline passes) and Unauthenticated.
    `url`: see `protocol.membership.registry.redis_url`."""

    def __init__(self, url: str, *, deadline_s: float = LIMIT_DEADLINE_S) -> None:
        self._client: Any = redis_client.connect_redis(redis_url.parse_redis_url(url), deadline_s)
        self._deadline_s = deadline_s
        self._scripts = {text: self._client.register_script(text) for text in (_ADMIT, _SETTLE, _RENEW)}

    async def admit(self, key_id: str, request_id: str, limits: KeyLimits, tokens: int) -> Verdict:
        """Charges the request as `RateLimitState.admit` does, for all gateways together."""
        ttl_ms = int(STREAM_TTL_S * 1000)
        arguments = [*_arguments(limits), request_id, tokens, ttl_ms]
        reply = await self._run(_ADMIT, self._keys(key_id), arguments)
        *waits, requests_full_s, tokens_full_s = map(float, reply[1:])
        named = dict(zip(("requests", "tokens", "streams"), waits, strict=True))
        return verdict(limits, named, (requests_full_s, tokens_full_s), refuses=not reply[0])

    async def settle(self, key_id: str, request_id: str, limits: KeyLimits, more_tokens: int) -> None:
        """Settles a request that has ended and used `more_tokens` more than it was charged."""
        arguments = [*_arguments(limits), request_id, more_tokens]
        await self._run(_SETTLE, self._keys(key_id), arguments)

    async def renew(self, in_flight: Iterable[tuple[str, str]]) -> None:
        """Extends the places of (key id, request id) pairs that are still in flight."""
        pairs = list(in_flight)
        if pairs:
            keys = [self._keys(key_id)[1] for key_id, _ in pairs]
            await self._run(_RENEW, keys, [int(STREAM_TTL_S * 1000), *(id for _, id in pairs)])

    async def close(self) -> None:
        await redis_client.close_redis(self._client)

    async def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        return await with_deadline(self._scripts[script](keys=keys, args=arguments), self._deadline_s)

    def _keys(self, key_id: str) -> list[str]:
        account = f"{PREFIX}:limit:{{{key_id}}}"
        return [account, f"{account}:streams"]


def _arguments(limits: KeyLimits) -> list[int | str]:
    values = (limits.requests_per_minute, limits.tokens_per_minute, limits.streams)
    return ["" if value is None else value for value in values]
