"""Accounts that several gateways share in the registry's Redis: each step is one atomic script, on Redis' clock.

Per key, under a prefix per cluster, and in one hash slot:
- `…:limit:{key}` hash of `requests` and `tokens`: the instants at which the buckets will be full, in seconds;
- `…:limit:{key}:streams` sorted set of the requests under way by the instant at which they count no more. Gateways
  renew them, so that those of one that died end by themselves.

Both end when nothing is in them. The arithmetic is that of `bucket` and `state`, and passes the same tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from gateway.keys.record import KeyLimits
from gateway.limits.bucket import MINUTE_S, PRECISION_S
from gateway.limits.limiter import DEADLINE_S, STREAM_TTL_S
from gateway.limits.state import STREAMS_RETRY_S, Balance, Verdict
from protocol.registry import redis_address, redis_client
from protocol.registry.redis_errors import cancellable, translated
from protocol.registry.redis_registry import PREFIX

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

# ARGV: the three limits ('' = none), request id, tokens, ms for which it counts.
# Gives whether it was admitted, then in seconds: the waits for each limit, and until each bucket is full.
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

# ARGV: the three limits, request id, tokens to take yet (less than 0 = to give back).
_SETTLE = (
    _COMMON
    + """
take('tokens', tonumber(ARGV[5]))
redis.call('ZREM', KEYS[2], ARGV[4])
"""
)

# KEYS: sorted sets. ARGV: ms, then a request id for each.
_RENEW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
for number, key in ipairs(KEYS) do
  redis.call('ZADD', key, now + ARGV[1] / 1000, ARGV[number + 1])
  redis.call('PEXPIRE', key, ARGV[1])
end
"""


class SharedLimits:
    """SharedAccounts (`gateway.limits.limiter`). Methods raise PeerError (PeerLost within the deadline) and
    Unauthenticated. `url` as in `protocol.registry.redis_address`."""

    def __init__(self, url: str, *, prefix: str = PREFIX, deadline_s: float = DEADLINE_S) -> None:
        self._client: Any = redis_client.connect(redis_address.parse(url), deadline_s)
        self._prefix = prefix
        self._deadline_s = deadline_s
        self._scripts = {
            text: self._client.register_script(text) for text in (_ADMIT, _SETTLE, _RENEW)
        }

    async def admit(self, key_id: str, request_id: str, limits: KeyLimits, tokens: int) -> Verdict:
        """As `LimitState.admit`, for all gateways together."""
        ttl_ms = int(STREAM_TTL_S * 1000)
        arguments = [*_arguments(limits), request_id, tokens, ttl_ms]
        reply = await self._run(_ADMIT, self._keys(key_id), arguments)
        return _verdict(limits, bool(reply[0]), [float(number) for number in reply[1:]])

    async def settle(
        self, key_id: str, request_id: str, limits: KeyLimits, more_tokens: int
    ) -> None:
        """The request has ended and took so many tokens more than it was charged."""
        arguments = [*_arguments(limits), request_id, more_tokens]
        await self._run(_SETTLE, self._keys(key_id), arguments)

    async def renew(self, under_way: Iterable[tuple[str, str]]) -> None:
        """These (key id, request id) go on."""
        pairs = list(under_way)
        if pairs:
            keys = [self._keys(key_id)[1] for key_id, _ in pairs]
            await self._run(_RENEW, keys, [int(STREAM_TTL_S * 1000), *(id for _, id in pairs)])

    async def close(self) -> None:
        await redis_client.close(self._client)

    async def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        with cancellable(), translated():
            async with asyncio.timeout(self._deadline_s):
                return await self._scripts[script](keys=keys, args=arguments)

    def _keys(self, key_id: str) -> list[str]:
        account = f"{self._prefix}:limit:{{{key_id}}}"
        return [account, f"{account}:streams"]


def _arguments(limits: KeyLimits) -> list[int | str]:
    values = (limits.requests_per_minute, limits.tokens_per_minute, limits.streams)
    return ["" if value is None else value for value in values]


def _verdict(limits: KeyLimits, admitted: bool, numbers: list[float]) -> Verdict:
    waits = dict(zip(("requests", "tokens", "streams"), numbers[:3], strict=True))
    worst = max(waits, key=lambda name: waits[name])
    return Verdict(
        refused_by=None if admitted else worst,
        retry_after_s=0.0 if admitted else waits[worst],
        requests=_balance(limits.requests_per_minute, numbers[3]),
        tokens=_balance(limits.tokens_per_minute, numbers[4]),
    )


def _balance(capacity: int | None, full_in_s: float) -> Balance | None:
    if capacity is None:
        return None
    level = capacity - full_in_s * capacity / MINUTE_S
    return Balance(limit=capacity, remaining=max(0, int(level + 1e-6)), reset_s=full_in_s)
