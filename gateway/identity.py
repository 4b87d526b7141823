"""From the options to the keys and limits of this gateway. redis is imported where there is one only."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from gateway.client_config import ClientConfig
from gateway.keys.file import KeyFile
from gateway.keys.holder import KeyHolder, KeyStore
from gateway.limits.limiter import Limiter, SharedAccounts


def open_keys(config: ClientConfig, registry: CollectorRegistry) -> KeyHolder:
    """Reads nothing yet."""
    stores: list[KeyStore] = []
    if config.api_key_file is not None:
        stores.append(KeyFile(Path(config.api_key_file)))
    if config.api_keys_in_registry and config.redis_url is not None:
        stores.append(redis_keys(config.redis_url))
    return KeyHolder(config.fixed_keys(), stores, registry)


def redis_keys(url: str) -> KeyStore:
    """Keys in a Redis. Raises ConfigError for a URL that is none."""
    from gateway.keys.redis_keys import RedisKeys

    return RedisKeys(url)


def open_limits(config: ClientConfig, registry: CollectorRegistry) -> Limiter:
    """Shared with other gateways where there is a Redis."""
    shared: SharedAccounts | None = None
    if config.redis_url is not None:
        from gateway.limits.shared import SharedLimits

        shared = SharedLimits(config.redis_url)
    return Limiter(shared, registry)
