"""Connections to Redis with redis-py: to a server, over a local socket, or through Sentinels.

Nothing waits longer than the deadline of one call, even if Sentinels are dead. The module does not know the commands.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError, ResponseError

from moonserve.protocol.errors import PeerError, PeerLost, Unauthenticated
from moonserve.protocol.membership.registry.redis_url import SENTINEL_OPTIONS, TLS_OPTIONS, RedisAddress

T = TypeVar("T")


def connect_redis(address: RedisAddress, deadline_s: float) -> Redis:
    """Returns a client that connects on first use. A call replaces a connection that broke while idle once."""
    kwargs: dict[str, Any] = {
        **_timeouts(deadline_s),
        **_tls_files(address),
        "db": address.db,
        "username": address.username,
        "password": address.password,
        "retry": Retry(NoBackoff(), 1),
    }
    if address.service is not None:
        return _by_sentinel(address, address.service, deadline_s, kwargs)
    if address.path is not None:
        pool = ConnectionPool(UnixDomainSocketConnection, path=address.path, **kwargs)
    else:
        ((host, port),) = address.hosts
        connection = SSLConnection if address.tls else Connection
        pool = ConnectionPool(connection, host=host, port=port, **kwargs)
    return Redis.from_pool(pool)


async def close_redis(client: Redis) -> None:
    """Closes the client and the connections to the Sentinels, which redis-py leaves open."""
    pool = client.connection_pool
    await client.aclose()
    if isinstance(pool, SentinelConnectionPool):
        await pool.sentinel_manager.aclose()


async def with_deadline(call: Awaitable[T], deadline_s: float) -> T:
    """Returns the reply of one call. Raises PeerError (PeerLost after the deadline) or Unauthenticated."""
    with cancellable(), translate_redis_errors():
        async with asyncio.timeout(deadline_s):
            return await call


def _by_sentinel(address: RedisAddress, service: str, deadline_s: float, kwargs: dict[str, Any]) -> Redis:
    tls: dict[str, Any] = {"ssl": True} if address.tls else {}
    sentinel_kwargs = {
        # Sentinels are queried one after the other, and time must be left for the server itself.
        **_timeouts(deadline_s / (len(address.hosts) + 1)),
        **_tls_files(address),
        **tls,
        **{
            name.removeprefix("sentinel_"): address.options[name]
            for name in SENTINEL_OPTIONS
            if name in address.options
        },
        "retry": Retry(NoBackoff(), 0),
    }
    sentinel = Sentinel(address.hosts, sentinel_kwargs=sentinel_kwargs)  # type: ignore[no-untyped-call]
    client: Redis = sentinel.master_for(service, **kwargs, **tls)
    return client


def _timeouts(seconds: float) -> dict[str, Any]:
    return {"socket_timeout": seconds, "socket_connect_timeout": seconds}


def _tls_files(address: RedisAddress) -> dict[str, str]:
    return {name: address.options[name] for name in TLS_OPTIONS if name in address.options}


@contextlib.contextmanager
def cancellable() -> Iterator[None]:
    """Raises a cancellation that redis-py lost within the block.

    redis-py sends within `asyncio.wait_for`, which before Python 3.12 drops a cancellation that arrives at the moment
    in which the send completes. Without this, a `RegistryLease` could renew forever.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


@contextlib.contextmanager
def translate_redis_errors() -> Iterator[None]:
    """Translates errors of redis-py and sockets to MoonserveErrors. redis-py quotes addresses, never passwords."""
    try:
        yield
    except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
        raise Unauthenticated(f"redis refuses the registry's credentials: {error}") from error
    except ResponseError as error:  # out of memory, a replica, a failing disk
        raise PeerError(f"redis refuses the call: {error}") from error
    except TimeoutError as error:
        raise PeerLost("redis did not answer in time") from error
    except MasterNotFoundError as error:  # its full text lists every Sentinel with all its options
        raise PeerLost(f"redis: {str(error).partition(' : ')[0]} by any sentinel") from error
    except (RedisError, OSError) as error:
        raise PeerLost(f"redis cannot be reached: {error}") from error
