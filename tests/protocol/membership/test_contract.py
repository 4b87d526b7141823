"""Tests of the guarantees of every registry, run against each implementation."""

import asyncio
from contextlib import aclosing, suppress
from typing import Any

import pytest

from moonserve.protocol.errors import InvalidRequest, StaleLease
from moonserve.protocol.membership.registry import MAX_EPOCH, Member, Superseded
from tests.patience import PATIENCE_S, answered
from tests.protocol.membership.conftest import Connect, ids, member, watched_until

SHORT_S = 0.5
"""Length of a lease whose end a test waits for."""


async def test_member_is_listed_as_it_joined_with_its_epoch(connect: Connect) -> None:
    wanted = member("store-ä b/1:*", capacity="4 GiB", zone="Zürich\n2")
    joined = await connect().join(wanted)
    assert joined.endpoint.epoch > 0
    assert await connect().members() == [joined]
    assert (joined.facts, joined.role, joined.owner) == (wanted.facts, "store", "owner-a")


async def test_members_are_sorted_by_id(connect: Connect) -> None:
    for name in ("store-2", "store-10", "decode-0"):
        await connect().join(member(name, owner=name))
    assert ids(await connect().members()) == ["decode-0", "store-10", "store-2"]


async def test_same_owner_takes_over_at_once_with_later_epoch(connect: Connect) -> None:
    first = await connect().join(member(port=1))
    second = await connect().join(member(port=2))
    assert second.endpoint.epoch > first.endpoint.epoch
    assert await connect().members() == [second]
    with pytest.raises(Superseded, match="taken over"):
        await connect().renew(first)
    await connect().renew(second)


async def test_error_for_another_owner_names_holder_and_remaining_time(connect: Connect) -> None:
    held = await connect().join(member(owner="a", port=4711), ttl_s=30)
    with pytest.raises(StaleLease, match=r"store-0 is held.*127\.0\.0\.1:4711, whose lease lasts another \d") as caught:
        await connect().join(member(owner="b"))
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= 30
    assert await connect().members() == [held]


async def test_one_of_many_concurrent_owners_gets_the_id(connect: Connect) -> None:
    claims = [connect().join(member(owner=f"owner-{n}")) for n in range(8)]
    outcomes = await asyncio.gather(*claims, return_exceptions=True)
    winners = [outcome for outcome in outcomes if isinstance(outcome, Member)]
    assert len(winners) == 1
    assert sum(isinstance(outcome, StaleLease) for outcome in outcomes) == 7
    assert await connect().members() == winners


async def test_new_epoch_is_above_the_members_last_epoch(connect: Connect) -> None:
    remembered = 2**61 + 1  # a double would round this
    joined = await connect().join(member(epoch=remembered))
    assert joined.endpoint.epoch == remembered + 1
    await connect().renew(joined)
    again = await connect().join(member(epoch=5))
    assert again.endpoint.epoch > joined.endpoint.epoch


async def test_claimed_epoch_does_not_raise_epochs_of_other_ids(connect: Connect) -> None:
    claimed = MAX_EPOCH - 1  # the highest claim accepted: the id cannot join again with the epoch that it gets
    assert (await connect().join(member("a", epoch=claimed))).endpoint.epoch == claimed + 1
    other = await connect().join(member("b"))
    assert other.endpoint.epoch < 2**61
    assert (await connect().join(other)).endpoint.epoch > other.endpoint.epoch


async def test_expired_lease_is_not_renewed_and_next_epoch_is_later(connect: Connect) -> None:
    first = await connect().join(member())
    await connect().leave(first)
    second = await connect().join(member(owner="b"), ttl_s=SHORT_S)
    await watched_until(connect(), lambda members: not members)
    with pytest.raises(StaleLease) as caught:
        await connect().renew(second)
    assert not isinstance(caught.value, Superseded)
    assert await connect().members() == []
    third = await connect().join(member(owner="c"))
    assert first.endpoint.epoch < second.endpoint.epoch < third.endpoint.epoch


async def test_renewal_extends_the_lease(connect: Connect) -> None:
    async def renewed() -> Member | None:
        """Returns None if the lease ended before it was renewed."""
        joined = await connect().join(member("kept"), ttl_s=1)
        with suppress(StaleLease):
            await connect().renew(joined, ttl_s=60)
            return joined
        return None

    kept = await answered(renewed)
    await connect().join(member("silent"), ttl_s=1)
    assert await watched_until(connect(), lambda m: "silent" not in ids(m)) == [kept]


async def test_leave_ends_only_the_lease_of_its_epoch(connect: Connect) -> None:
    first = await connect().join(member())
    second = await connect().join(member())
    await connect().leave(first)
    assert await connect().members() == [second]
    await connect().leave(second)
    await connect().leave(second)
    assert await connect().members() == []
    await connect().join(member(owner="b"))


async def test_watch_yields_members_now_and_after_each_change(connect: Connect) -> None:
    watching: Any = connect().watch()
    async with asyncio.timeout(PATIENCE_S), aclosing(watching):
        assert await anext(watching) == []
        first = await connect().join(member("a"))
        assert await anext(watching) == [first]
        second = await connect().join(member("b"))
        assert await anext(watching) == [first, second]
        await connect().renew(second, ttl_s=SHORT_S)
        assert await anext(watching) == [first]  # the lease of `second` ended by itself
        again = await connect().join(member("a"))
        assert await anext(watching) == [again]
        await connect().leave(again)
        assert await anext(watching) == []


async def test_all_watchers_reach_the_same_members(connect: Connect) -> None:
    def whole(members: list[Member]) -> bool:
        return len(members) == 20

    watchers = [asyncio.create_task(watched_until(connect(), whole)) for _ in range(4)]
    joins = [connect().join(member(f"store-{n:02}")) for n in range(20)]
    joined = await asyncio.gather(*joins)
    assert await asyncio.gather(*watchers) == [list(joined)] * 4


async def test_cancelled_watch_and_call_do_not_affect_others(connect: Connect) -> None:
    registry = connect()
    watching = asyncio.create_task(watched_until(registry, lambda members: False))
    joining = asyncio.create_task(registry.join(member("cut")))
    await asyncio.sleep(0)  # both are in flight
    for task in (watching, joining):
        task.cancel()
    await asyncio.wait({watching, joining})
    joined = await registry.join(member())
    assert joined in await registry.members()


@pytest.mark.parametrize(
    "bad",
    [
        member(""),
        member("a" * 201),
        member("new\nline"),
        member(owner=""),
        member(epoch=MAX_EPOCH),
        member(much="x" * 20_000),
    ],
    ids=["no id", "long id", "unprintable id", "no owner", "epoch too high", "large facts"],
)
async def test_malformed_member_is_an_invalid_request(connect: Connect, bad: Member) -> None:
    with pytest.raises(InvalidRequest):
        await connect().join(bad)
    assert await connect().members() == []


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 1e9])
async def test_lease_time_out_of_range_is_refused(connect: Connect, ttl_s: float) -> None:
    joined = await connect().join(member())
    with pytest.raises(InvalidRequest):
        await connect().join(member(), ttl_s=ttl_s)
    with pytest.raises(InvalidRequest):
        await connect().renew(joined, ttl_s=ttl_s)
    assert await connect().members() == [joined]
