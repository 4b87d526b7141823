"""Tests of `RegistryLease`: it outlives its registry, follows its epochs, and ends when another process has the id."""

import asyncio
import contextlib

import pytest

from moonserve.protocol.errors import InvalidRequest, PeerLost, StaleLease, Unauthenticated
from moonserve.protocol.membership.registry import Member, Registry
from moonserve.protocol.membership.registry.client import RemoteRegistry
from moonserve.protocol.membership.registry.lease import RegistryLease, registry_lease
from tests.patience import PATIENCE_S, answered, came_true
from tests.protocol.membership.conftest import Connect, OpenRedis, member, served, watched_until
from tests.redis_server import RedisServer

TTL_S = 60.0
"""Many times as long as a renewal takes on a busy machine."""
RENEW_EVERY_S = 0.1


class Holder:
    """A lease and a queue of the epochs that it reported."""

    def __init__(self, registry: Registry, joining: Member) -> None:
        self.epochs: asyncio.Queue[int] = asyncio.Queue()
        self.lease = RegistryLease(
            registry,
            joining,
            ttl_s=TTL_S,
            renew_every_s=RENEW_EVERY_S,
            on_epoch=lambda joined: self.epochs.put_nowait(joined.endpoint.epoch),
        )

    async def epoch(self) -> int:
        """Waits for the next epoch that the lease reports."""
        return await asyncio.wait_for(self.epochs.get(), PATIENCE_S)


async def lost(task: asyncio.Task[None]) -> BaseException | None:
    await asyncio.wait({task}, timeout=PATIENCE_S)
    return task.exception()


async def lease_end(registry: Registry, instance_id: str) -> tuple[float, float]:
    """Returns the earliest and latest end of a lease by the loop's clock, as reported to another owner."""
    loop = asyncio.get_running_loop()
    sent_at = loop.time()
    with pytest.raises(StaleLease) as caught:
        await registry.join(member(instance_id, owner="another"))
    left_s = caught.value.retry_after_s or 0.0
    return sent_at + left_s, loop.time() + left_s


async def test_lease_joins_renews_and_leaves(connect: Connect) -> None:
    registry, holder = connect(), Holder(connect(), member("kept"))
    async with registry_lease(holder.lease):
        assert await holder.epoch() == holder.lease.member.endpoint.epoch
        assert holder.lease.joined.is_set()
        _, first_end = await lease_end(registry, "kept")
        await answered(lambda: lease_end(registry, "kept"), lambda end: end[0] > first_end + RENEW_EVERY_S)
        assert await registry.members() == [holder.lease.member]
        assert holder.epochs.empty()
    assert await registry.members() == []


async def test_restarted_process_takes_its_id_and_ends_the_old_lease(connect: Connect) -> None:
    first, second = (Holder(connect(), member()) for _ in range(2))
    async with registry_lease(first.lease) as first_task:
        await first.epoch()
        async with registry_lease(second.lease) as second_task:
            assert await second.epoch() > first.lease.member.endpoint.epoch
            error = await lost(first_task)
            assert isinstance(error, StaleLease)
            assert "store-0 was taken by another process" in str(error)
            assert not second_task.done()
    assert await connect().members() == []


async def test_join_waits_for_the_lease_of_a_dead_owner(connect: Connect) -> None:
    registry, holder = connect(), Holder(connect(), member(owner="b"))
    dead = await registry.join(member(owner="a"), ttl_s=1.0)
    async with registry_lease(holder.lease):
        assert await holder.epoch() > dead.endpoint.epoch


async def test_first_of_two_owners_keeps_the_id(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second owner ends with StaleLease. Its error says that the lease ends now, and joins only after a renewal."""
    first, registry = Holder(connect(), member(owner="a")), connect()
    join, loop = registry.join, asyncio.get_running_loop()

    async def join_after_renewal(joining: Member, *, ttl_s: float) -> Member:
        if joining.owner != "b":
            return await join(joining, ttl_s=ttl_s)
        sent_at = loop.time()
        await came_true(lambda: loop.time() - first.lease.silence_s > sent_at)
        try:
            return await join(joining, ttl_s=ttl_s)
        except StaleLease as error:
            error.retry_after_s = 0.0
            raise

    async with registry_lease(first.lease) as first_task:
        await first.epoch()
        monkeypatch.setattr(registry, "join", join_after_renewal)
        async with registry_lease(Holder(registry, member(owner="b")).lease) as second_task:
            error = await lost(second_task)
            assert isinstance(error, StaleLease)
            assert "belongs to another process, which keeps renewing it" in str(error)
            assert "another id" in str(error)
        assert not first_task.done()
        # The loser's leave must not end the winner's lease.
        assert await connect().members() == [first.lease.member]


async def test_lease_is_lost_if_another_owner_joined_meanwhile(connect: Connect) -> None:
    registry, holder = connect(), Holder(connect(), member(owner="a"))
    async with registry_lease(holder.lease) as task:
        await holder.epoch()

        async def taken() -> bool:
            """Returns False if the lease's own renewal comes first."""
            await registry.leave(holder.lease.member)  # as if its lease had ended
            with contextlib.suppress(StaleLease):
                await registry.join(member(owner="b"), ttl_s=60)
                return True
            return False

        await answered(taken)
        assert isinstance(await lost(task), StaleLease)


async def test_join_with_lost_answer_does_not_end_the_lease(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = connect()
    join, to_lose = registry.join, 2

    async def join_with_lost_answer(joining: Member, *, ttl_s: float) -> Member:
        nonlocal to_lose
        joined = await join(joining, ttl_s=ttl_s)
        if to_lose:
            to_lose -= 1
            raise PeerLost("the answer was lost")
        return joined

    monkeypatch.setattr(registry, "join", join_with_lost_answer)
    holder = Holder(registry, member())
    async with registry_lease(holder.lease) as task:
        before = await holder.epoch()
        to_lose = 2
        await registry.leave(holder.lease.member)  # as if its lease had ended
        assert await holder.epoch() > before
        assert await registry.members() == [holder.lease.member]
        assert not task.done()


async def test_epoch_of_a_late_join_is_adopted(connect: Connect) -> None:
    """A lease follows a join that takes effect late, since a resumed registry may handle old requests in any order."""
    registry, holder = connect(), Holder(connect(), member())
    async with registry_lease(holder.lease) as task:
        await holder.epoch()
        late = await registry.join(holder.lease.member)
        assert await holder.epoch() == late.endpoint.epoch
        assert not task.done()
    assert await registry.members() == []


async def test_malformed_member_ends_the_lease_at_once(connect: Connect) -> None:
    async with registry_lease(Holder(connect(), member("")).lease) as task:
        assert isinstance(await lost(task), InvalidRequest)


async def test_wrong_token_ends_the_lease_at_once() -> None:
    async with served() as address:
        registry = RemoteRegistry(address, "guess")
        async with registry_lease(Holder(registry, member()).lease) as task:
            assert isinstance(await lost(task), Unauthenticated)
        await registry.close()


async def test_members_join_again_after_redis_was_killed(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, open_redis: OpenRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis comes back empty: it refuses each renewal, and each member joins again under a later epoch."""
    registry = open_redis(redis_server.url, poll_s=0.1)
    renew, asked = registry.renew, asyncio.Semaphore(0)

    async def renew_counted(joining: Member, *, ttl_s: float) -> None:
        asked.release()
        await renew(joining, ttl_s=ttl_s)

    monkeypatch.setattr(registry, "renew", renew_counted)
    holders = [Holder(registry, member(f"store-{n}", owner=str(n))) for n in range(3)]
    async with (
        registry_lease(holders[0].lease) as a,
        registry_lease(holders[1].lease) as b,
        registry_lease(holders[2].lease),
    ):
        before = [await holder.epoch() for holder in holders]
        watching = asyncio.create_task(
            watched_until(registry, lambda m: [x.endpoint.epoch for x in m] > before and len(m) == 3)
        )
        redis_server.kill()
        await came_true(lambda: caplog.text.count("cannot be used") >= len(holders))
        for _ in range(4 * len(holders)):  # the seats keep asking, and log it once each
            await asked.acquire()
        assert not a.done()
        assert not b.done()
        redis_server.start()
        after = [await holder.epoch() for holder in holders]
        assert all(late > early for late, early in zip(after, before, strict=True))
        assert await watching == [holder.lease.member for holder in holders]
        assert caplog.text.count("cannot be used") == 3


async def test_leave_without_a_registry_does_not_hang(redis_server: RedisServer, open_redis: OpenRedis) -> None:
    registry = open_redis(redis_server.url, deadline_s=1.0)
    holder = Holder(registry, member())
    async with asyncio.timeout(PATIENCE_S):
        async with registry_lease(holder.lease):
            await holder.epoch()
            redis_server.stop()


async def test_withdrawn_permissions_do_not_end_a_held_lease(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, open_redis: OpenRedis
) -> None:
    holder = Holder(open_redis(redis_server.url), member())
    async with registry_lease(holder.lease) as task:
        await holder.epoch()
        redis_server.ask("ACL", "SETUSER", "default", "-@scripting")
        await came_true(lambda: "refuses the registry's credentials" in caplog.text)
        assert not task.done()
