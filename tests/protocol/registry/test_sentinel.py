"""The registry behind real Sentinels: the server is found, and found again after a failover."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from typing import Any, NamedTuple

import pytest

from protocol.errors import PeerLost
from protocol.registry.seat import Seat, seated
from tests.patience import PATIENCE_S, until
from tests.protocol.registry.conftest import OpenRedis, member
from tests.redis_server import RedisServer

DOWN_AFTER_MS = 60_000
"""A server that is only slow stays what it is."""


class Guarded(NamedTuple):
    """A server, its replica, and the Sentinel that watches both as `main`."""

    master: RedisServer
    replica: RedisServer
    sentinel: RedisServer

    @property
    def url(self) -> str:
        # The first of the Sentinels is dead.
        return f"redis+sentinel://127.0.0.1:1,{self.sentinel.address}/main"


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    with ExitStack() as stack:
        master = stack.enter_context(RedisServer("--repl-diskless-sync-delay", "0"))
        replica = stack.enter_context(RedisServer("--replicaof", "127.0.0.1", str(master.port)))
        # A Sentinel looks for replicas when it starts, then every 10 s: the replica must be there before.
        until(lambda: b"state=online" in master.ask("INFO", "replication"))
        lines = [
            f"sentinel monitor main 127.0.0.1 {master.port} 1",
            f"sentinel down-after-milliseconds main {DOWN_AFTER_MS}",
            "sentinel failover-timeout main 5000",
        ]
        sentinel = stack.enter_context(RedisServer(sentinel=lines))
        # Without it, a Sentinel has nobody to promote, however long it is waited for.
        until(lambda: str(replica.port).encode() in sentinel.ask("SENTINEL", "REPLICAS", "main"))
        yield Guarded(master, replica, sentinel)


async def test_the_server_is_found_through_a_sentinel(guarded: Guarded, open_redis: OpenRedis) -> None:
    registry = open_redis(guarded.url)
    joined = await registry.join(member())
    assert b"store-0" in guarded.master.ask("SMEMBERS", "moonserve:members")
    assert await registry.members() == [joined]


async def test_a_service_that_the_sentinels_do_not_know_is_peer_lost(guarded: Guarded, open_redis: OpenRedis) -> None:
    registry = open_redis(guarded.url.replace("/main", "/other"))
    with pytest.raises(PeerLost, match="No master found for 'other'"):
        await registry.members()


@pytest.mark.slow  # the Sentinel waits until the server is down, votes, and promotes: 2 to 6 s
async def test_a_failover_is_followed_by_seats_and_watchers(guarded: Guarded, open_redis: OpenRedis) -> None:
    registry = open_redis(guarded.url, deadline_s=0.5, poll_s=0.1)
    seat = Seat(registry, member(), renew_every_s=0.2)
    watching: Any = open_redis(guarded.url, deadline_s=0.5, poll_s=0.1).watch()
    async with asyncio.timeout(2 * PATIENCE_S), aclosing(watching), seated(seat) as task:
        await seat.joined.wait()
        async for members in watching:
            if members == [seat.member]:
                break
        # A Sentinel that stood still looks on for 30 s, and promotes none that lost its master ten times this before.
        guarded.sentinel.ask("SENTINEL", "SET", "main", "down-after-milliseconds", "4000")
        guarded.master.kill()
        newcomer = member("store-1", owner="b")
        while True:
            try:
                joined = await registry.join(newcomer, ttl_s=60)
                break
            except PeerLost:
                await asyncio.sleep(0.1)
        assert b"role:master" in guarded.replica.ask("INFO", "replication")
        async for members in watching:
            if members == [seat.member, joined]:
                break
        assert not task.done()
