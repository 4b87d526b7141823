"""From the text that an operator gives (`--registry`) to the Registry it means."""

from __future__ import annotations

from protocol.errors import ConfigError
from protocol.registry import redis_address
from protocol.registry.base import Registry
from protocol.registry.remote import RemoteRegistry
from protocol.tls import Certificates

EMBEDDED_SCHEME = "moonserve"


def connect(url: str, *, cluster_token: str, tls: Certificates | None = None) -> Registry:
    """Reaches nothing yet, so that a process can start while its registry is away.

    `host:port` or `moonserve://host:port` is the process that holds the embedded registry; the rest is Redis, whose
    URL says itself whether it speaks TLS. Raises ConfigError, which never quotes a password.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return RemoteRegistry(_address(url), cluster_token, tls)
    if scheme == EMBEDDED_SCHEME:
        return RemoteRegistry(_address(rest), cluster_token, tls)
    if scheme in redis_address.SCHEMES:
        # Its client takes a fifth of the time that a process needs for its imports, and few clusters have a Redis.
        from protocol.registry.redis_registry import RedisRegistry

        return RedisRegistry(url)
    raise ConfigError(
        f"unknown scheme {scheme!r} of the registry; write host:port or moonserve://host:port for "
        f"the process that holds it, or for a Redis {redis_address.FORMS}"
    )


def _address(text: str) -> str:
    host, _, port = text.rstrip("/").rpartition(":")
    if not host or "@" in host or "/" in host or not (port.isascii() and port.isdigit()):
        raise ConfigError("the registry's address must be host:port or moonserve://host:port, or a URL of a Redis")
    return f"{host}:{port}"
