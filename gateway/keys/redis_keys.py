"""Keys in the registry's Redis, for gateways on several machines.

Under a prefix per cluster:
- `…:api-keys` hash of digest → JSON of the record;
- `…:api-keys:version` counts the changes, so that a look that finds nothing new is one short reply;
- `…:api-keys:changed` channel with a message after each change.

A Redis that comes back empty has lost the keys, not revoked them: gateways that run keep those that they knew, and say
so. It must keep its data (`appendonly yes`) for those that start later.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from gateway.keys.record import ApiKey, from_json
from protocol.errors import ConfigError, InvalidRequest, PeerError
from protocol.registry import redis_address, redis_client
from protocol.registry.redis_errors import cancellable, translated
from protocol.registry.redis_registry import DEADLINE_S, POLL_S, PREFIX

T = TypeVar("T")


class RedisKeys:
    """A KeyStore (`gateway.keys.holder`). Methods raise PeerError (PeerLost within the deadline), Unauthenticated."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = PREFIX,
        deadline_s: float = DEADLINE_S,
        poll_s: float = POLL_S,
    ) -> None:
        """Reaches nothing yet. Raises ConfigError for a URL that is none."""
        self._client: Any = redis_client.connect(redis_address.parse(url), deadline_s)
        self._deadline_s = deadline_s
        self._poll_s = poll_s
        self._keys, self._version, self._changed = (
            f"{prefix}:api-keys{part}" for part in ("", ":version", ":changed")
        )

    async def all(self) -> list[ApiKey]:
        return _parsed(await self._bounded(self._client.hgetall(self._keys)))

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

    async def watch(self) -> AsyncGenerator[list[ApiKey], None]:
        changes, seen = self._client.pubsub(), None
        try:
            # Before the first look, so that no change falls in between.
            await self._bounded(changes.subscribe(self._changed))
            while True:
                version = await self._bounded(self._client.get(self._version))
                if version is None and seen is not None:
                    raise PeerError("redis has lost the API keys: those known so far go on")
                if version != seen or seen is None:
                    yield await self.all()
                    seen = version or b"0"
                with cancellable(), translated():
                    await changes.get_message(timeout=self._poll_s)
        finally:
            await changes.aclose()

    async def close(self) -> None:
        await redis_client.close(self._client)

    async def _commit(self, pipeline: Any) -> list[Any]:
        pipeline.incr(self._version)
        pipeline.publish(self._changed, "")
        replies: list[Any] = await self._bounded(pipeline.execute())
        return replies

    async def _bounded(self, call: Awaitable[T]) -> T:
        with cancellable(), translated():
            async with asyncio.timeout(self._deadline_s):
                return await call


def _parsed(entries: dict[bytes, bytes]) -> list[ApiKey]:
    try:
        return [from_json(json.loads(text)) for text in entries.values()]
    except (ValueError, InvalidRequest) as error:
        raise ConfigError(
            f"a key in redis is not as `moonserve keys` writes it: {error}"
        ) from error
