"""Creates the Registry that the operator's option `--registry` describes."""

from __future__ import annotations

from protocol.errors import ConfigError
from protocol.registry import redis_address
from protocol.registry.base import Registry
from protocol.registry.remote import RemoteRegistry
from protocol.tls import Certificates

EMBEDDED_SCHEME = "moonserve"


def connect(url: str, *, cluster_token: str, tls: Certificates | None = None) -> Registry:
    """Returns the Registry for `url`. It connects on first use, so that a process can start without its registry.

    `host:port` or `moonserve://host:port` is the process with the embedded registry. Other schemes are Redis, whose URL
    determines whether it uses TLS. Raises ConfigError, which never quotes a password.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return RemoteRegistry(_address(url), cluster_token, tls)
    if scheme == EMBEDDED_SCHEME:
        return RemoteRegistry(_address(rest), cluster_token, tls)
    if scheme in redis_address.SCHEMES:
        # Importing the Redis client takes a fifth of a process's import time, and few clusters use Redis.
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
