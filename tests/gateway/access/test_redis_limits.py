"""Limits that gateways share in a real Redis: the same arithmetic, atomic, and what happens without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from gateway.access.key_record import KeyLimits
from gateway.access.limit_state import STREAM_TTL_S
from gateway.access.limiter import REST_S, Limiter
from gateway.access.redis_stores import SharedLimits
from protocol.errors import PeerLost
from protocol.process import running
from tests.patience import PATIENCE_S, answered
from tests.redis_server import RedisServer

MANY = KeyLimits(requests_per_minute=50, tokens_per_minute=10_000)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
async def shared(redis: RedisServer) -> AsyncIterator[SharedLimits]:
    redis.ask("FLUSHALL")
    made = SharedLimits(redis.url, deadline_s=PATIENCE_S)
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks again waits for what is being settled as long as it takes."""
    monkeypatch.setattr("gateway.access.limiter.DEADLINE_S", PATIENCE_S)


@pytest.fixture
async def two_gateways(redis: RedisServer) -> AsyncIterator[list[Limiter]]:
    redis.ask("FLUSHALL")
    made = [Limiter(SharedLimits(redis.url, deadline_s=PATIENCE_S), CollectorRegistry()) for _ in range(2)]
    yield made
    for limiter in made:
        await limiter.close()


async def test_two_gateways_together_let_in_what_one_would(two_gateways: list[Limiter]) -> None:
    async def ask(number: int) -> bool:
        limiter = two_gateways[number % 2]
        return (await limiter.admit("k", str(number), MANY, 1)).refused_by is None

    admitted = sum(await asyncio.gather(*(ask(number) for number in range(200))))
    # One more refills each 1.2 s; before Redis hears of all, a busy machine may take a while.
    assert 50 <= admitted < 100


async def test_a_request_is_charged_as_a_whole_or_not_at_all_and_accounts_end_by_themselves(
    shared: SharedLimits, redis: RedisServer
) -> None:
    limits = KeyLimits(requests_per_minute=2, tokens_per_minute=100, streams=10)
    assert (await shared.admit("k", "1", limits, 80)).refused_by is None
    refused = await shared.admit("k", "2", limits, 80)
    assert refused.refused_by == "tokens"
    assert 20 < refused.retry_after_s <= 36
    assert refused.requests is not None
    assert refused.requests.remaining == 1  # the refused one was not counted
    assert (await shared.admit("k", "2", limits, 20)).refused_by is None
    last = await shared.admit("k", "3", limits, 0)
    assert last.refused_by == "requests"
    assert 0 < last.retry_after_s <= 30
    left_ms = int(redis.ask("PTTL", "moonserve:limit:{k}")[1:].split()[0])
    assert 0 < left_ms <= 61_000  # a minute until the bucket is full, and a second more


async def test_places_are_shared_and_those_of_the_dead_end(shared: SharedLimits, redis: RedisServer) -> None:
    limits = KeyLimits(streams=2)
    for name in ("1", "2"):
        assert (await shared.admit("k", name, limits, 5)).refused_by is None
    assert (await shared.admit("k", "3", limits, 5)).refused_by == "streams"
    await shared.settle("k", "1", limits, 0)
    assert (await shared.admit("k", "3", limits, 5)).refused_by is None
    await shared.renew([("k", "2"), ("k", "3")])
    # What nobody renews: its time is set back instead of waited for.
    redis.ask("ZADD", "moonserve:limit:{k}:streams", "1", "2")
    assert (await shared.admit("k", "4", limits, 5)).refused_by is None
    left_ms = int(redis.ask("PTTL", "moonserve:limit:{k}:streams")[1:].split()[0])
    assert 0 < left_ms <= STREAM_TTL_S * 1000


async def test_what_was_not_taken_is_given_back_to_all(two_gateways: list[Limiter]) -> None:
    limits, (one, other) = KeyLimits(tokens_per_minute=1_000), two_gateways
    assert (await one.admit("k", "1", limits, 1_000)).refused_by is None
    assert (await other.admit("k", "2", limits, 900)).refused_by == "tokens"
    one.settle("k", "1", limits, 50)

    async def is_let_in() -> bool:
        return (await other.admit("k", "3", limits, 900)).refused_by is None

    await answered(is_let_in)
    assert (await one.admit("k", "4", limits, 900)).refused_by == "tokens"


async def test_who_has_the_last_byte_may_ask_again_at_once(two_gateways: list[Limiter]) -> None:
    limits, one = KeyLimits(streams=1), two_gateways[0]
    for number in range(20):
        assert (await one.admit("k", str(number), limits, 1)).refused_by is None
        one.settle("k", str(number), limits, 1)


class Slow(SharedLimits):
    """A Redis to which renewals take until `arriving`."""

    def __init__(self, url: str) -> None:
        super().__init__(url, deadline_s=PATIENCE_S)
        self.renewing, self.arriving, self.renewed = (asyncio.Event() for _ in range(3))

    async def renew(self, under_way: Iterable[tuple[str, str]]) -> None:
        self.renewing.set()
        await self.arriving.wait()
        await super().renew(under_way)
        self.renewed.set()


async def test_a_request_that_ends_while_places_are_renewed_leaves_none(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.access.limiter.RENEW_EVERY_S", 0.0)
    redis.ask("FLUSHALL")
    slow = Slow(redis.url)
    one = Limiter(slow, CollectorRegistry())
    assert (await one.admit("k", "1", KeyLimits(streams=1), 1)).refused_by is None
    async with running(one.run()):
        await slow.renewing.wait()
        one.settle("k", "1", KeyLimits(streams=1), 1)
        await asyncio.sleep(0.05)  # what does not wait has ended
        slow.arriving.set()
        await slow.renewed.wait()
        assert (await one.admit("k", "2", KeyLimits(streams=1), 1)).refused_by is None
    await one.close()


async def test_without_redis_each_gateway_counts_for_itself_and_returns_to_it() -> None:
    now = [0.0]
    limits = KeyLimits(requests_per_minute=3)
    with RedisServer() as server:
        shared = SharedLimits(server.url, deadline_s=PATIENCE_S)
        limiter = Limiter(shared, CollectorRegistry(), clock=lambda: now[0])
        assert (await limiter.admit("k", "1", limits, 0)).refused_by is None
        server.kill()
        verdicts = [await limiter.admit("k", str(n), limits, 0) for n in range(2, 5)]
        assert [v.refused_by for v in verdicts] == [None, None, "requests"]
        server.start()
        now[0] += 60 + REST_S
        server.ask("HSET", "moonserve:limit:{k}", "requests", "99999999999")
        assert (await limiter.admit("k", "9", limits, 0)).refused_by == "requests"
        assert limiter.state.look("k", limits, now[0]).requests.remaining == 3
        await limiter.close()


async def test_a_redis_that_hangs_costs_one_request_its_deadline() -> None:
    with RedisServer() as server:
        shared = SharedLimits(server.url, deadline_s=PATIENCE_S)
        asked: list[str] = []
        limiter = Limiter(shared, CollectorRegistry(), clock=lambda: 0.0)
        assert (await limiter.admit("k", "0", MANY, 0)).refused_by is None
        server.stop()
        shared._deadline_s = 0.2
        with pytest.raises(PeerLost):
            await shared.admit("k", "x", MANY, 0)
        original = shared.admit

        async def counted(*arguments: object) -> object:
            asked.append(str(arguments[1]))
            return await original(*arguments)  # type: ignore[arg-type]

        shared.admit = counted  # type: ignore[method-assign, assignment]
        for number in range(1, 9):
            assert (await limiter.admit("k", str(number), MANY, 0)).refused_by is None
        assert asked == ["1"]
        server.go_on()
        await limiter.close()
