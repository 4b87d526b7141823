"""Tests of remote registries that stop, die, fill up, lock out, fail over, come back empty or change their clock."""

import asyncio
import logging
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moonserve.deploy.launcher.ports import free_port
from moonserve.protocol.errors import PeerError, PeerLost, StaleLease, Unauthenticated
from moonserve.protocol.membership.registry import Registry
from moonserve.protocol.membership.registry.client import RemoteRegistry
from moonserve.protocol.membership.registry.lease import RegistryLease, registry_lease
from tests.authority import Authority
from tests.patience import PATIENCE_S, until
from tests.protocol.membership.conftest import OpenRedis, member, served, watched_until
from tests.redis_server import RedisServer

DEADLINE_S = 0.5


async def require_silence(registry: Registry) -> None:
    """Asserts that every call ends with PeerLost, at its deadline."""
    async with asyncio.timeout(PATIENCE_S):
        for call in (registry.join, registry.renew, registry.leave):
            with pytest.raises(PeerLost):
                await call(member())
        with pytest.raises(PeerLost):
            await registry.members()


async def test_stopped_server_raises_peer_lost_within_the_deadline(
    redis_server: RedisServer, open_redis: OpenRedis
) -> None:
    patient = open_redis(redis_server.url)
    registry = open_redis(redis_server.url, deadline_s=DEADLINE_S)
    joined = await patient.join(member())
    redis_server.stop()
    await require_silence(registry)
    redis_server.go_on()
    joined = await patient.join(joined)
    assert await patient.members() == [joined]


async def test_watch_continues_after_server_is_killed(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    patient = open_redis(redis_server.url)
    registry = open_redis(redis_server.url, deadline_s=DEADLINE_S, poll_s=0.1)
    watching: Any = registry.watch()
    async with asyncio.timeout(PATIENCE_S), aclosing(watching):
        assert await anext(watching) == []
        joined = await patient.join(member())
        assert await anext(watching) == [joined]
        upcoming = asyncio.ensure_future(anext(watching))
        redis_server.kill()
        redis_server.start()
        assert await upcoming == []  # the restarted server reports an empty membership
        with pytest.raises(StaleLease, match="the registry forgot it"):
            await patient.renew(joined)
        upcoming = asyncio.ensure_future(anext(watching))
        redis_server.stop()
        with pytest.raises(PeerLost):
            await registry.members()
        redis_server.go_on()
        again = await patient.join(member())  # a process that remembers no epoch
        assert again.endpoint.epoch > joined.endpoint.epoch
        assert await upcoming == [again]


async def test_watch_waits_for_a_server_that_starts_later(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    redis_server.kill()
    registry = open_redis(redis_server.url, deadline_s=DEADLINE_S)
    watching = asyncio.create_task(watched_until(registry, lambda members: True))
    with pytest.raises(PeerLost):
        await registry.members()
    redis_server.start()
    assert await watching == []


async def test_watch_continues_after_a_change_of_password(
    redis_server: RedisServer, open_redis: OpenRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running watch survives refused credentials, as a lease does. A new watch raises Unauthenticated."""
    registry = open_redis(redis_server.url)
    joined = await registry.join(member())
    refused, bounded = asyncio.Event(), registry._bounded

    async def noting(call: Any) -> Any:
        try:
            return await bounded(call)
        except Unauthenticated:
            refused.set()
            raise

    monkeypatch.setattr(registry, "_bounded", noting)
    watching: Any = registry.watch()
    async with asyncio.timeout(PATIENCE_S), aclosing(watching):
        assert await anext(watching) == [joined]
        upcoming = asyncio.create_task(anext(watching))
        redis_server.restart("--requirepass", "hunter2")
        await refused.wait()
        with pytest.raises(Unauthenticated):
            await anext(open_redis(redis_server.url).watch())
        redis_server.restart()
        assert await upcoming == []


async def test_failover_that_loses_a_join_forgets_the_lease(redis: RedisServer, open_redis: OpenRedis) -> None:
    """A lagging replica shows an earlier epoch. The member with the later epoch joins again, above both."""
    registry = open_redis(redis.url, prefix="lagging")
    early = await registry.join(member())
    late = await registry.join(member())
    redis.ask("HSET", "lagging:member:store-0", "epoch", str(early.endpoint.epoch))
    redis.ask("HSET", "lagging:epochs", "store-0", str(early.endpoint.epoch))
    with pytest.raises(StaleLease, match="forgot"):
        await registry.renew(late)
    again = await registry.join(late)
    assert again.endpoint.epoch > late.endpoint.epoch


async def test_epochs_grow_after_server_clock_is_set_back(redis: RedisServer, open_redis: OpenRedis) -> None:
    registry = open_redis(redis.url, prefix="back")
    in_2040 = str(2_208_988_800 * 10**9)  # an epoch given before the clock was corrected
    redis.ask("HSET", "back:epochs", "store-0", in_2040)
    assert (await registry.join(member())).endpoint.epoch == int(in_2040) + 1


async def test_ended_lease_leaves_only_its_epoch(redis: RedisServer, open_redis: OpenRedis) -> None:
    registry = open_redis(redis.url, prefix="traces", poll_s=0.1)
    await registry.join(member("a"), ttl_s=0.3)
    await registry.leave(await registry.join(member("b")))
    await watched_until(registry, lambda members: not members)
    assert redis.ask("EXISTS", "traces:members", "traces:member:a", "traces:member:b") == b":0\r\n"
    assert redis.ask("HLEN", "traces:epochs") == b":2\r\n"


async def test_unreadable_member_raises_peer_error(redis: RedisServer, open_redis: OpenRedis) -> None:
    registry = open_redis(redis.url, prefix="odd")
    await registry.join(member())
    redis.ask("HSET", "odd:member:store-0", "member", "{}")
    with pytest.raises(PeerError, match="cannot be read"):
        await registry.members()


async def test_full_server_raises_peer_error_with_reason(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    registry = open_redis(redis_server.url)
    redis_server.ask("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(PeerError, match="maxmemory"):
        await registry.join(member())


@pytest.mark.parametrize("form", ["redis://:{}@{}", "redis://default:{}@{}"])
async def test_password_is_used_and_never_logged(
    form: str, caplog: pytest.LogCaptureFixture, open_redis: OpenRedis
) -> None:
    caplog.set_level(logging.DEBUG)
    with RedisServer("--requirepass", "hunter2") as server:
        right = open_redis(form.format("hunter2", server.address))
        wrong = open_redis(form.format("hunter3", server.address))
        without = open_redis(server.url)
        await right.join(member())
        texts = []
        for registry in (wrong, without):
            with pytest.raises(Unauthenticated) as caught:
                await registry.members()
            texts += [str(caught.value), repr(caught.value), repr(registry)]
        server.kill()
        with pytest.raises(PeerLost) as gone:
            await right.members()
        for text in [*texts, str(gone.value), caplog.text]:
            assert "hunter" not in text


async def test_database_numbers_separate_clusters_over_tcp_and_unix(redis: RedisServer, open_redis: OpenRedis) -> None:
    third = open_redis(f"{redis.url}/3", prefix="numbered")
    joined = await third.join(member())
    by_path = open_redis(f"unix://{redis.socket_path}?db=3", prefix="numbered", poll_s=0.1)
    assert await watched_until(by_path, bool) == [joined]
    assert await open_redis(redis.url, prefix="numbered").members() == []


async def test_cancellation_at_any_moment_is_not_lost(redis: RedisServer, open_redis: OpenRedis) -> None:
    registry = open_redis(redis.url, prefix="cancelled")
    joined = await registry.join(member())
    for turns in range(300):
        renewing = asyncio.create_task(registry.renew(joined))
        for _ in range(turns % 30):  # the number of loop turns before the cancellation
            await asyncio.sleep(0)
        was_under_way = renewing.cancel()
        await asyncio.wait({renewing})
        assert renewing.cancelled() == was_under_way
    await registry.renew(joined)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl (.ci/system-packages)")
async def test_tls_is_used_and_other_authority_is_refused(
    redis_server: RedisServer, open_redis: OpenRedis, tmp_path: Path
) -> None:
    files = Authority(tmp_path).sign("redis", names="IP:127.0.0.1")
    settings = {
        "tls-cert-file": files.certificate,
        "tls-key-file": files.key,
        "tls-ca-cert-file": files.authority,
        "tls-auth-clients": "no",
        "tls-port": free_port(),
    }
    pairs = [str(part) for setting in settings.items() for part in setting]
    assert redis_server.ask("CONFIG", "SET", *pairs) == b"+OK\r\n"
    url = f"rediss://127.0.0.1:{settings['tls-port']}"
    trusting = open_redis(f"{url}?ssl_ca_certs={files.authority}")
    joined = await trusting.join(member())
    assert await open_redis(redis_server.url).members() == [joined]
    with pytest.raises(PeerLost, match="certificate"):
        await open_redis(url).members()


async def test_restarted_embedded_registry_is_empty_and_gives_later_epochs() -> None:
    async with served(free_port()) as address:
        registry = RemoteRegistry(address, "secret", deadline_s=PATIENCE_S)
        watching: Any = registry.watch()
        before = await registry.join(member())
        assert await anext(watching) == [before]
    with pytest.raises(PeerLost):
        await registry.members()
    async with served(int(address.rpartition(":")[2])), asyncio.timeout(PATIENCE_S), aclosing(watching):
        assert await anext(watching) == []
        with pytest.raises(StaleLease, match="forgot"):
            await registry.renew(before)
        fresh = await registry.join(member())
        assert fresh.endpoint.epoch > before.endpoint.epoch
        assert await anext(watching) == [fresh]
    await registry.close()


async def test_silent_process_raises_peer_lost_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        registry = RemoteRegistry(address, "secret", deadline_s=0.05)
        await require_silence(registry)
        await registry.close()


DOWN_AFTER_MS = 60_000
"""Long enough that a slow server keeps its role."""


class Guarded(NamedTuple):
    """A Redis server, its replica, and the Sentinel that watches both as `main`."""

    master: RedisServer
    replica: RedisServer
    sentinel: RedisServer

    @property
    def url(self) -> str:
        # The first Sentinel in the list is dead.
        return f"redis+sentinel://127.0.0.1:1,{self.sentinel.address}/main"


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    with ExitStack() as stack:
        master = stack.enter_context(RedisServer("--repl-diskless-sync-delay", "0"))
        replica = stack.enter_context(RedisServer("--replicaof", "127.0.0.1", str(master.port)))
        # A Sentinel looks for replicas when it starts, then every 10 s, so the replica must be online before.
        until(lambda: b"state=online" in master.ask("INFO", "replication"))
        lines = [
            f"sentinel monitor main 127.0.0.1 {master.port} 1",
            f"sentinel down-after-milliseconds main {DOWN_AFTER_MS}",
            "sentinel failover-timeout main 5000",
        ]
        sentinel = stack.enter_context(RedisServer(sentinel=lines))
        # A Sentinel that does not know the replica can never promote it.
        until(lambda: str(replica.port).encode() in sentinel.ask("SENTINEL", "REPLICAS", "main"))
        yield Guarded(master, replica, sentinel)


async def test_server_is_found_through_a_sentinel(guarded: Guarded, open_redis: OpenRedis) -> None:
    registry = open_redis(guarded.url)
    joined = await registry.join(member())
    assert b"store-0" in guarded.master.ask("SMEMBERS", "moonserve:members")
    assert await registry.members() == [joined]
    with pytest.raises(PeerLost, match="No master found for 'other'"):
        await open_redis(guarded.url.replace("/main", "/other")).members()


@pytest.mark.slow  # the Sentinel waits until the server is down, votes, and promotes: 2 to 6 s
async def test_leases_and_watchers_follow_a_failover(guarded: Guarded, open_redis: OpenRedis) -> None:
    registry = open_redis(guarded.url, deadline_s=0.5, poll_s=0.1)
    lease = RegistryLease(registry, member(), renew_every_s=0.2)
    watching: Any = open_redis(guarded.url, deadline_s=0.5, poll_s=0.1).watch()
    async with asyncio.timeout(2 * PATIENCE_S), aclosing(watching), registry_lease(lease) as task:
        await lease.joined.wait()
        async for members in watching:
            if members == [lease.member]:
                break
        # A paused Sentinel is passive for 30 s, and promotes no replica that lost its master ten times this long ago.
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
            if members == [lease.member, joined]:
                break
        assert not task.done()
