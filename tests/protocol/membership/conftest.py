"""Fixtures for registry tests: the three registries behind one interface, Redis servers, and members."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from moonserve.protocol.membership.registry import Member, Registry
from moonserve.protocol.membership.registry.client import RemoteRegistry
from moonserve.protocol.membership.registry.embedded import EmbeddedRegistry, RegistryService
from moonserve.protocol.membership.registry.redis_registry import RedisRegistry
from moonserve.protocol.pb import registry_pb2_grpc
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.grpc_transport import RpcServer
from tests.patience import PATIENCE_S
from tests.redis_server import RedisServer

Connect = Callable[[], Registry]
"""Opens the same registry as another process would."""

OpenRedis = Callable[..., RedisRegistry]
"""Constructor of `RedisRegistry`."""

_prefixes = itertools.count()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A Redis server that the test may stop and kill."""
    with RedisServer() as server:
        yield server


@pytest.fixture
async def open_redis() -> AsyncIterator[OpenRedis]:
    """The constructor of `RedisRegistry` with a long deadline. Registries that it opens are closed after the test."""
    opened: list[RedisRegistry] = []

    def open_one(*args: Any, **kwargs: Any) -> RedisRegistry:
        opened.append(RedisRegistry(*args, **{"deadline_s": PATIENCE_S, **kwargs}))
        return opened[-1]

    yield open_one
    for registry in opened:
        await registry.close()


@contextlib.asynccontextmanager
async def served(port: int = 0, token: str = "secret") -> AsyncIterator[str]:
    """Serves a new, empty embedded registry over gRPC and gives its address."""
    registry, server = EmbeddedRegistry(), RpcServer(token)
    registry_pb2_grpc.add_RegistryServicer_to_server(RegistryService(registry), server.grpc)
    try:
        yield await server.start("127.0.0.1", port)
        registry.validate()
    finally:
        await server.stop(0)
        await registry.close()


@pytest.fixture(params=["embedded", "over gRPC", "redis"])
async def connect(request: pytest.FixtureRequest, open_redis: OpenRedis) -> AsyncIterator[Connect]:
    if request.param == "embedded":
        registry = EmbeddedRegistry()
        yield lambda: registry
        registry.validate()
        await registry.close()
    elif request.param == "over gRPC":
        async with served() as address, contextlib.AsyncExitStack() as stack:

            def connected() -> Registry:
                client = RemoteRegistry(address, "secret", deadline_s=PATIENCE_S)
                stack.push_async_callback(client.close)
                return client

            yield connected
    else:
        server: RedisServer = request.getfixturevalue("redis")
        prefix = f"test-{next(_prefixes)}"
        yield lambda: open_redis(server.url, prefix=prefix, poll_s=0.2)


def member(
    instance_id: str = "store-0", *, owner: str = "owner-a", epoch: int = 0, port: int = 7000, **facts: str
) -> Member:
    return Member(
        endpoint=Endpoint(
            instance_id=instance_id,
            epoch=epoch,
            rpc_address=f"127.0.0.1:{port}",
            transfer_address="tcp/1",
            host="host-1",
        ),
        role="store",
        owner=owner,
        facts=facts,
    )


def ids(members: list[Member]) -> list[str]:
    return [member.instance_id for member in members]


async def watched_until(registry: Registry, holds: Callable[[list[Member]], bool]) -> list[Member]:
    """Watches the registry and returns the first membership for which `holds` is true."""
    watching: Any = registry.watch()
    async with asyncio.timeout(PATIENCE_S), aclosing(watching):
        async for members in watching:
            if holds(members):
                return list(members)
    raise AssertionError("a watch does not end")
