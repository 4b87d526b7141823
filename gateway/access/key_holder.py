"""The keys that count at a gateway: those of its flags, of a file, of the registry, followed as they change.

Rule: what cannot be read changes nothing. A broken file and a registry that is away leave the keys known so far, which
is said once and counted. Until a store was read for the first time nobody's key is known, which is another answer than
a wrong key. Finding takes the same time whatever was presented: the table is asked for the digest of what came, which
nobody can steer towards a stored one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.access.key_record import ApiKey, digest_of
from protocol.errors import MoonserveError, NoWorker

log = logging.getLogger(__name__)

POLL_S = 1.0
"""How late a change may be noticed. A look is one stat, or one short reply."""


class KeyStore(Protocol):
    """Where keys are kept. Methods raise ConfigError for what is there but no keys, PeerError where it is away."""

    async def all(self) -> list[ApiKey]: ...

    async def add(self, key: ApiKey) -> None:
        """A record of the same key is replaced."""

    async def revoke(self, key_id: str) -> bool:
        """False when there is no such key."""

    async def stamp(self) -> object:
        """Another one after each change. None: there are no keys to read."""

    async def close(self) -> None: ...


class KeyHolder:
    """`fixed`: keys of flags. Without these and stores the gateway is open to all."""

    def __init__(self, fixed: Sequence[ApiKey], stores: Sequence[KeyStore], registry: CollectorRegistry) -> None:
        self.is_open = not fixed and not stores
        self.names_tenants = bool(stores) or any(key.tenant for key in fixed)
        self._stores = stores
        # By place: flags, then each store; None = not read yet.
        self._parts: list[list[ApiKey] | None] = [list(fixed), *(None for _ in stores)]
        self._by_digest = {key.digest: key for key in fixed}  # of two of one key the later counts
        self._failures = Counter(
            "moonserve_api_keys_reload_failures",
            "Times that API keys could not be read; those known before stayed.",
            registry=registry,
        )
        self._count = Gauge("moonserve_api_keys", "API keys that count now.", registry=registry)
        self._count.set(len(self._by_digest))

    def find(self, presented: bytes) -> ApiKey | None:
        """None for a wrong key. Raises NoWorker while it may be one of a store that could not be read yet."""
        found = self._by_digest.get(digest_of(presented))
        if found is None and any(part is None for part in self._parts):
            raise NoWorker("the API keys are not known yet: their registry does not answer")
        return found

    async def load(self) -> None:
        """Reads every store once. Raises ConfigError; a registry that is away is waited for later, by `run`."""
        for place, store in enumerate(self._stores, 1):
            try:
                self._take(place, await store.all())
            except MoonserveError as error:
                if not error.retryable:
                    raise
                log.warning("API keys: %s", error)

    async def run(self) -> None:
        """Follows the stores until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for place, store in enumerate(self._stores, 1):
                tasks.create_task(self._follow(place, store), name=f"API keys {place}")

    async def close(self) -> None:
        for store in self._stores:
            await store.close()

    async def _follow(self, place: int, store: KeyStore) -> None:
        said, seen = "", None
        while True:
            try:
                # Before reading: who writes meanwhile is seen the next time.
                if (now := await store.stamp()) is None or now != seen:
                    self._take(place, await store.all())
                    seen, said = now, ""
            except MoonserveError as error:
                self._failures.inc()
                if str(error) != said:
                    log.error("the API keys stay as they were: %s", error)
                said = str(error)
            await asyncio.sleep(POLL_S)

    def _take(self, place: int, keys: list[ApiKey]) -> None:
        before, self._parts[place] = self._parts[place], keys
        self._by_digest = {key.digest: key for part in self._parts for key in part or ()}
        self._count.set(len(self._by_digest))
        if before is not None and before != keys:
            log.info("%d API keys now", len(self._by_digest))
