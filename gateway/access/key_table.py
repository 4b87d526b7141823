"""API keys that are valid at a gateway: from its flags, a file and the registry. Follows their changes.

Rule: a failed read changes nothing. If a file is broken or the registry is away, the known keys stay valid; this is
logged once and counted. Until every store has been read once an unknown key is not rejected as wrong; the lookup raises
NoWorker. A lookup takes the same time for any key, because the table is searched by digest and nobody can steer a
digest towards a stored one.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from moonserve.gateway.access.api_key import ApiKey, digest_of
from moonserve.protocol.errors import MoonserveError, NoWorker

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Longest delay until a change is noticed. Each check is one stat or one short reply."""


class KeyStore(Protocol):
    """Storage of keys. Methods raise ConfigError if the content is not valid keys, PeerError if the store is away."""

    async def all(self) -> list[ApiKey]: ...

    async def add(self, key: ApiKey) -> None:
        """Adds a key. Replaces a record of the same key."""

    async def revoke(self, key_id: str) -> bool:
        """Removes a key. Returns False if there is no such key."""

    async def version(self) -> object:
        """Returns a value that differs after each change, or None if there are no keys to read."""

    async def close(self) -> None: ...


class KeyTable:
    """Table of the valid keys. `fixed`: keys from flags. Without keys and stores the gateway is open to all."""

    def __init__(self, fixed: Sequence[ApiKey], stores: Sequence[KeyStore], registry: CollectorRegistry) -> None:
        self.is_open = not fixed and not stores
        self.names_tenants = bool(stores) or any(key.tenant for key in fixed)
        self._stores = stores
        # Index 0: flags, then one entry per store; None = not read yet.
        self._parts: list[list[ApiKey] | None] = [list(fixed), *(None for _ in stores)]
        self._by_digest = {key.digest: key for key in fixed}  # of two records of one key the later counts
        self._failures = Counter(
            "moonserve_api_keys_reload_failures",
            "Failed reads of the API keys; the known keys stay valid.",
            registry=registry,
        )
        self._count = Gauge("moonserve_api_keys", "Valid API keys.", registry=registry)
        self._count.set(len(self._by_digest))

    def find(self, presented: bytes) -> ApiKey | None:
        """Returns the key, or None if it is wrong. Raises NoWorker if an unread store may contain it."""
        found = self._by_digest.get(digest_of(presented))
        if found is None and any(part is None for part in self._parts):
            raise NoWorker("the API keys are not loaded yet, because their registry does not reply; try again")
        return found

    async def load(self) -> None:
        """Reads every store once. Raises ConfigError. If the registry is away, `run` tries again later."""
        for place, store in enumerate(self._stores, 1):
            try:
                self._replace_keys(place, await store.all())
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
        logged, version = "", None
        while True:
            try:
                # Taken before reading, so that a concurrent change is noticed the next time.
                if (now := await store.version()) is None or now != version:
                    self._replace_keys(place, await store.all())
                    version, logged = now, ""
            except MoonserveError as error:
                self._failures.inc()
                if str(error) != logged:
                    log.error("cannot read the API keys; the known ones stay valid: %s", error)
                logged = str(error)
            await asyncio.sleep(POLL_S)

    def _replace_keys(self, place: int, keys: list[ApiKey]) -> None:
        before, self._parts[place] = self._parts[place], keys
        self._by_digest = {key.digest: key for part in self._parts for key in part or ()}
        self._count.set(len(self._by_digest))
        if before is not None and before != keys:
            log.info("%d API keys are valid now", len(self._by_digest))
