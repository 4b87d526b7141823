"""Usage of every key at one gateway, and the decision whether it may have more. Pure; `now` in monotonic seconds.

    absent ── admit ──► in flight ── settle ──► absent            a refusal changes nothing

A request is admitted as a whole: one request, its expected tokens and one place among the requests in flight. At its
end the difference to its actual tokens is settled: it is given back, or becomes a debt that later requests wait for. So
a refused request costs nothing, and tokens are never charged twice or forgotten. A request that needs more than a whole
bucket is admitted when the bucket is full.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moonserve.gateway.access.api_key import KeyLimits

MINUTE_S = 60.0
PRECISION_S = 1e-6
"""Waits up to this long count as zero: sums of doubles, and Redis' clock, are no more exact."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Token bucket, represented by the time at which it is full. `full_at` in the past means full."""

    full_at: float = float("-inf")

    def wait_s(self, amount: float, capacity: int, now: float) -> float:
        """Returns the seconds until `amount` can be taken; 0 = now. More than the capacity needs a full bucket."""
        spare_s = max(0.0, capacity - amount) / capacity * MINUTE_S
        wait_s = self.full_at - now - spare_s
        return wait_s if wait_s > PRECISION_S else 0.0

    def after(self, amount: float, capacity: int, now: float) -> "Bucket":
        """Returns the bucket after `amount` is taken, or given back if negative."""
        return Bucket(max(self.full_at, now) + amount / capacity * MINUTE_S)

    def full_in_s(self, now: float) -> float:
        return max(0.0, self.full_at - now)


DEADLINE_S = 0.25
"""Longest wait of a request for the registry; after it the gateway's own account decides."""
STREAM_TTL_S = 30.0
"""Time for which the registry keeps the places of requests of a dead gateway."""
STREAMS_RETRY_S = 1.0
"""Retry time for the limit of requests in flight: the end of a request is not predictable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Current level of one limit."""

    limit: int
    remaining: int
    reset_s: float  # until the whole limit is available again


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of a check. `refused_by`: the limit with the longest wait; None = admitted. No balance without a limit."""

    refused_by: str | None = None
    retry_after_s: float = 0.0
    requests: Balance | None = None
    tokens: Balance | None = None


@dataclass(slots=True, eq=False)
class _Account:
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    in_flight: dict[str, int] = field(default_factory=dict)  # request id → tokens charged


class RateLimitState:
    """Accounts by key id. `forget_idle` removes accounts that carry no information."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def check(self, key_id: str, limits: KeyLimits, now: float) -> Verdict:
        """Returns the verdict on a request without tokens, and charges nothing."""
        account = self._accounts.get(key_id) or _Account()
        return _judge(account, limits, 0, now)

    def admit(self, key_id: str, request_id: str, limits: KeyLimits, tokens: int, now: float) -> Verdict:
        """Charges the request if all limits have room for it. Request ids are unique."""
        account = self._accounts.setdefault(key_id, _Account())
        verdict = _judge(account, limits, tokens, now)
        if verdict.refused_by is not None:
            return verdict
        assert request_id not in account.in_flight, "request ids are unique"
        account.in_flight[request_id] = tokens
        if limits.requests_per_minute is not None:
            account.requests = account.requests.after(1, limits.requests_per_minute, now)
        _charge(account, limits, tokens, now)
        return _judge(account, limits, 0, now, refuses=False)

    def settle(self, key_id: str, request_id: str, limits: KeyLimits, tokens: int, now: float) -> None:
        """Settles a request that has ended and used `tokens` tokens. Does nothing if it is not in flight."""
        account = self._accounts.get(key_id)
        charged = None if account is None else account.in_flight.pop(request_id, None)
        if account is not None and charged is not None:
            _charge(account, limits, tokens - charged, now)

    def withdraw(self, key_id: str, request_id: str, limits: KeyLimits, now: float) -> None:
        """Undoes the admission of a request, because the shared account refused it."""
        self.settle(key_id, request_id, limits, 0, now)
        account = self._accounts.get(key_id)
        if account is not None and limits.requests_per_minute is not None:
            account.requests = account.requests.after(-1, limits.requests_per_minute, now)

    def forget_idle(self, now: float) -> None:
        """Removes accounts with full buckets and nothing in flight, which equal new ones."""
        idle = [key_id for key_id, account in self._accounts.items() if _is_idle(account, now)]
        for key_id in idle:
            del self._accounts[key_id]

    def in_flight(self) -> list[tuple[str, str]]:
        """Returns (key id, request id) of each request that is not settled."""
        return [(key, request) for key, a in self._accounts.items() for request in a.in_flight]

    def validate(self) -> None:
        """Raises AssertionError if an account contradicts itself."""
        for account in self._accounts.values():
            assert all(tokens >= 0 for tokens in account.in_flight.values())


def _judge(account: _Account, limits: KeyLimits, tokens: int, now: float, *, refuses: bool = True) -> Verdict:
    waits = {
        "requests": _wait_s(account.requests, 1, limits.requests_per_minute, now),
        "tokens": _wait_s(account.tokens, tokens, limits.tokens_per_minute, now),
        "streams": STREAMS_RETRY_S if limits.streams is not None and len(account.in_flight) >= limits.streams else 0.0,
    }
    full_in_s = (account.requests.full_in_s(now), account.tokens.full_in_s(now))
    return verdict(limits, waits, full_in_s, refuses=refuses)


def _wait_s(bucket: Bucket, amount: int, capacity: int | None, now: float) -> float:
    return 0.0 if capacity is None else bucket.wait_s(amount, capacity, now)


def verdict(
    limits: KeyLimits,
    waits: Mapping[str, float],
    full_in_s: tuple[float, float],
    *,
    refuses: bool,
) -> Verdict:
    """Makes a verdict. `waits`: for each limit. `full_in_s`: until the buckets of requests and of tokens are full."""
    worst = max(waits, key=lambda name: waits[name])
    return Verdict(
        refused_by=worst if refuses and waits[worst] > 0 else None,
        retry_after_s=waits[worst] if refuses else 0.0,
        requests=_balance(limits.requests_per_minute, full_in_s[0]),
        tokens=_balance(limits.tokens_per_minute, full_in_s[1]),
    )


def _balance(capacity: int | None, full_in_s: float) -> Balance | None:
    if capacity is None:
        return None
    level = capacity - full_in_s * capacity / MINUTE_S
    return Balance(limit=capacity, remaining=max(0, int(level + 1e-6)), reset_s=full_in_s)


def _charge(account: _Account, limits: KeyLimits, tokens: int, now: float) -> None:
    if limits.tokens_per_minute is not None:
        account.tokens = account.tokens.after(tokens, limits.tokens_per_minute, now)


def _is_idle(account: _Account, now: float) -> bool:
    buckets = (account.requests, account.tokens)
    return not account.in_flight and all(bucket.full_at <= now for bucket in buckets)
