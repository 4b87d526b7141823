"""Rate limits: shared by gateways in a real Redis, without Redis, and as a state machine in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from moonserve.gateway.access.api_key import KeyLimits
from moonserve.gateway.access.rate_limit_service import BACK_OFF_S, RateLimiter
from moonserve.gateway.access.rate_limit_state import STREAM_TTL_S, Bucket, RateLimitState
from moonserve.gateway.access.redis_stores import RedisRateLimits
from moonserve.protocol.errors import PeerLost
from moonserve.protocol.process.event_loop import background_task
from tests.patience import PATIENCE_S, answered
from tests.redis_server import RedisServer
from tests.thoroughness import any_order

MANY = KeyLimits(requests_per_minute=50, tokens_per_minute=10_000)


@pytest.fixture
async def shared(redis: RedisServer) -> AsyncIterator[RedisRateLimits]:
    redis.ask("FLUSHALL")
    made = RedisRateLimits(redis.url, deadline_s=PATIENCE_S)
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives waits for settlements in progress a long deadline."""
    monkeypatch.setattr("moonserve.gateway.access.rate_limit_service.DEADLINE_S", PATIENCE_S)


@pytest.fixture
async def two_gateways(redis: RedisServer) -> AsyncIterator[list[RateLimiter]]:
    redis.ask("FLUSHALL")
    made = [RateLimiter(RedisRateLimits(redis.url, deadline_s=PATIENCE_S), CollectorRegistry()) for _ in range(2)]
    yield made
    for limiter in made:
        await limiter.close()


async def test_two_gateways_together_admit_as_many_as_one(two_gateways: list[RateLimiter]) -> None:
    async def ask(number: int) -> bool:
        limiter = two_gateways[number % 2]
        return (await limiter.admit("k", str(number), MANY, 1)).refused_by is None

    admitted = sum(await asyncio.gather(*(ask(number) for number in range(200))))
    # One request is refilled per 1.2 s, and a busy machine may take a while until Redis has received all.
    assert 50 <= admitted < 100


async def test_request_is_charged_completely_or_not_and_accounts_expire(
    shared: RedisRateLimits, redis: RedisServer
) -> None:
    limits = KeyLimits(requests_per_minute=2, tokens_per_minute=100, streams=10)
    assert (await shared.admit("k", "1", limits, 80)).refused_by is None
    refused = await shared.admit("k", "2", limits, 80)
    assert refused.refused_by == "tokens"
    assert 20 < refused.retry_after_s <= 36
    assert refused.requests.remaining == 1  # the refused request was not counted
    assert (await shared.admit("k", "2", limits, 20)).refused_by is None
    last = await shared.admit("k", "3", limits, 0)
    assert last.refused_by == "requests"
    assert 0 < last.retry_after_s <= 30
    left_ms = int(redis.ask("PTTL", "moonserve:limit:{k}")[1:].split()[0])
    assert 0 < left_ms <= 61_000  # a minute until the bucket is full, plus one second


async def test_places_are_shared_and_those_of_dead_gateway_expire(shared: RedisRateLimits, redis: RedisServer) -> None:
    limits = KeyLimits(streams=2)
    for name in ("1", "2"):
        assert (await shared.admit("k", name, limits, 5)).refused_by is None
    assert (await shared.admit("k", "3", limits, 5)).refused_by == "streams"
    await shared.settle("k", "1", limits, 0)
    assert (await shared.admit("k", "3", limits, 5)).refused_by is None
    await shared.renew([("k", "2"), ("k", "3")])
    # A place that is not renewed: the test sets its time back instead of waiting.
    redis.ask("ZADD", "moonserve:limit:{k}:streams", "1", "2")
    assert (await shared.admit("k", "4", limits, 5)).refused_by is None
    left_ms = int(redis.ask("PTTL", "moonserve:limit:{k}:streams")[1:].split()[0])
    assert 0 < left_ms <= STREAM_TTL_S * 1000


async def test_unused_tokens_return_to_the_shared_account(two_gateways: list[RateLimiter]) -> None:
    limits, (one, other) = KeyLimits(tokens_per_minute=1_000), two_gateways
    assert (await one.admit("k", "1", limits, 1_000)).refused_by is None
    assert (await other.admit("k", "2", limits, 900)).refused_by == "tokens"
    one.settle("k", "1", limits, 50)
    await answered(lambda: other.admit("k", "3", limits, 900), lambda admitted: admitted.refused_by is None)
    assert (await one.admit("k", "4", limits, 900)).refused_by == "tokens"


async def test_client_may_send_its_next_request_at_the_last_byte(two_gateways: list[RateLimiter]) -> None:
    limits, one = KeyLimits(streams=1), two_gateways[0]
    for number in range(20):
        assert (await one.admit("k", str(number), limits, 1)).refused_by is None
        one.settle("k", str(number), limits, 1)


class Slow(RedisRateLimits):
    """Redis store whose renewals wait for `arriving`."""

    def __init__(self, url: str) -> None:
        super().__init__(url, deadline_s=PATIENCE_S)
        self.renewing, self.arriving, self.renewed = (asyncio.Event() for _ in range(3))

    async def renew(self, in_flight: Iterable[tuple[str, str]]) -> None:
        self.renewing.set()
        await self.arriving.wait()
        await super().renew(in_flight)
        self.renewed.set()


async def test_request_that_ends_during_renewal_leaves_no_place(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonserve.gateway.access.rate_limit_service.RENEW_EVERY_S", 0.0)
    redis.ask("FLUSHALL")
    slow = Slow(redis.url)
    one = RateLimiter(slow, CollectorRegistry())
    assert (await one.admit("k", "1", KeyLimits(streams=1), 1)).refused_by is None
    async with background_task(one.run()):
        await slow.renewing.wait()
        one.settle("k", "1", KeyLimits(streams=1), 1)
        await asyncio.sleep(0.05)  # a settlement that does not wait would be done by now
        slow.arriving.set()
        await slow.renewed.wait()
        assert (await one.admit("k", "2", KeyLimits(streams=1), 1)).refused_by is None
    await one.close()


async def test_gateway_counts_alone_while_redis_is_away() -> None:
    now = [0.0]
    limits = KeyLimits(requests_per_minute=3)
    with RedisServer() as server:
        shared = RedisRateLimits(server.url, deadline_s=PATIENCE_S)
        limiter = RateLimiter(shared, CollectorRegistry(), clock=lambda: now[0])
        assert (await limiter.admit("k", "1", limits, 0)).refused_by is None
        server.kill()
        verdicts = [await limiter.admit("k", str(n), limits, 0) for n in range(2, 5)]
        assert [v.refused_by for v in verdicts] == [None, None, "requests"]
        server.start()
        now[0] += 60 + BACK_OFF_S
        server.ask("HSET", "moonserve:limit:{k}", "requests", "99999999999")
        assert (await limiter.admit("k", "9", limits, 0)).refused_by == "requests"
        assert limiter.state.check("k", limits, now[0]).requests.remaining == 3
        await limiter.close()


async def test_hanging_redis_delays_only_one_request() -> None:
    with RedisServer() as server:
        shared = RedisRateLimits(server.url, deadline_s=PATIENCE_S)
        limiter = RateLimiter(shared, CollectorRegistry(), clock=lambda: 0.0)
        assert (await limiter.admit("k", "0", MANY, 0)).refused_by is None
        server.stop()
        shared._deadline_s = 0.2
        with pytest.raises(PeerLost):
            await shared.admit("k", "x", MANY, 0)
        shared.admit = counted = AsyncMock(wraps=shared.admit)
        for number in range(1, 9):
            assert (await limiter.admit("k", str(number), MANY, 0)).refused_by is None
        assert [call.args[1] for call in counted.call_args_list] == ["1"]
        server.go_on()
        await limiter.close()


LIMITS = KeyLimits(requests_per_minute=5, tokens_per_minute=1_000, streams=3)


@given(capacity=st.integers(1, 10**6), takes=st.lists(st.tuples(st.floats(0, 30), st.floats(0, 1)), max_size=40))
def test_no_period_takes_more_than_a_bucket_and_its_refill(capacity: int, takes: list[tuple[float, float]]) -> None:
    bucket, now, taken = Bucket(), 0.0, []
    for gap, share in takes:
        now += gap
        amount = share * capacity
        if bucket.wait_s(amount, capacity, now) == 0.0:
            bucket = bucket.after(amount, capacity, now)
            taken.append((now, amount))
    for first, (begin, _) in enumerate(taken):
        total = 0.0
        for at, amount in taken[first:]:
            total += amount
            assert total <= capacity * (1 + (at - begin) / 60) * (1 + 1e-7) + 1e-6


@given(capacity=st.integers(1, 10**6), debt=st.floats(0, 5), share=st.floats(0, 1), now=st.floats(0, 10**6))
def test_request_is_admitted_exactly_after_retry_after(capacity: int, debt: float, share: float, now: float) -> None:
    bucket = Bucket().after(debt * capacity, capacity, now)
    wait_s = bucket.wait_s(share * capacity, capacity, now)
    assert bucket.wait_s(share * capacity, capacity, now + wait_s) == pytest.approx(0, abs=1e-6)
    if wait_s > 0.01:
        assert bucket.wait_s(share * capacity, capacity, now + wait_s - 0.01) > 0


@dataclass
class Books:
    """Independent record of one key's use: charges by time, and requests in flight."""

    charges: list[tuple[float, int]] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    in_flight: dict[str, int] = field(default_factory=dict)


class Limits(RuleBasedStateMachine):
    """Random requests of two keys. No request has more tokens than a bucket holds."""

    def __init__(self) -> None:
        super().__init__()
        self.state = RateLimitState()
        self.now = 0.0
        self.books = {"a": Books(), "b": Books()}
        self.count = 0

    @rule(seconds=st.floats(0, 90))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=st.sampled_from("ab"), tokens=st.integers(0, 1_000))
    def ask(self, key: str, tokens: int) -> None:
        books, self.count = self.books[key], self.count + 1
        verdict = self.state.admit(key, str(self.count), LIMITS, tokens, self.now)
        if len(books.in_flight) == 3:
            assert verdict.refused_by is not None
        if verdict.refused_by is None:
            books.in_flight[str(self.count)] = tokens
            books.requests.append(self.now)
            books.charges.append((self.now, tokens))
        else:
            assert verdict.retry_after_s > 0
            after = self.now + verdict.retry_after_s + 1e-6
            again = self.state.check(key, LIMITS, after)
            if verdict.refused_by == "requests":
                assert again.refused_by in (None, "streams")

    @precondition(lambda self: any(books.in_flight for books in self.books.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        live = [(key, id) for key, books in self.books.items() for id in books.in_flight]
        key, request_id = data.draw(st.sampled_from(live))
        charged = self.books[key].in_flight.pop(request_id)
        took = data.draw(st.integers(0, charged))
        self.state.settle(key, request_id, LIMITS, took, self.now)
        self.state.settle(key, request_id, LIMITS, 999, self.now)  # a second settlement has no effect

    @rule()
    def tidy(self) -> None:
        self.state.forget_idle(self.now)

    @invariant()
    def nobody_has_had_too_much(self) -> None:
        self.state.validate()
        for books in self.books.values():
            assert len(books.in_flight) <= 3
            for first, begin in enumerate(books.requests):
                for nth, at in enumerate(books.requests[first:], 1):
                    assert nth <= 5 * (1 + (at - begin) / 60) + 1e-6

    @invariant()
    def what_is_under_way_is_known(self) -> None:
        mine = {(key, id) for key, books in self.books.items() for id in books.in_flight}
        assert set(self.state.in_flight()) == mine


TestLimits = any_order(Limits, 60)


def test_settlement_returns_unused_tokens_or_adds_a_debt() -> None:
    state, limits = RateLimitState(), KeyLimits(tokens_per_minute=600)
    assert state.admit("k", "1", limits, 600, 0.0).tokens.remaining == 0
    assert state.admit("k", "2", limits, 1, 0.0).refused_by == "tokens"
    state.settle("k", "1", limits, 100, 0.0)
    assert state.check("k", limits, 0.0).tokens.remaining == 500
    state.admit("k", "3", limits, 500, 0.0)
    state.settle("k", "3", limits, 800, 0.0)
    owing = state.admit("k", "4", limits, 100, 0.0)
    assert owing.refused_by == "tokens"
    assert owing.retry_after_s == pytest.approx(40.0)  # 300 owed and 100 requested, at 10 per second
    assert state.admit("k", "4", limits, 100, 40.0).refused_by is None
    # A request for more than a whole bucket waits until the bucket is full.
    assert state.admit("k", "5", limits, 5_000, 94.0).retry_after_s == pytest.approx(6.0)
    assert state.admit("k", "5", limits, 5_000, 100.0).refused_by is None


def test_withdrawn_request_leaves_no_trace() -> None:
    state = RateLimitState()
    before = state.check("k", LIMITS, 0.0)
    state.admit("k", "1", LIMITS, 700, 0.0)
    state.withdraw("k", "1", LIMITS, 0.0)
    assert state.check("k", LIMITS, 0.0) == before
    state.forget_idle(0.0)
    assert len(state) == 0


def test_verdict_names_the_limit_with_the_longest_wait() -> None:
    state = RateLimitState()
    for number in range(3):
        state.admit("k", str(number), LIMITS, 300, 0.0)
    verdict = state.admit("k", "3", LIMITS, 1_000, 0.0)
    assert (verdict.refused_by, verdict.retry_after_s) == ("tokens", pytest.approx(54.0))
    assert state.admit("k", "3", LIMITS, 0, 0.0).refused_by == "streams"
    assert (verdict.requests.remaining, verdict.tokens.remaining) == (2, 100)
    assert verdict.requests.reset_s == pytest.approx(36.0)
