"""What every key has asked for at one gateway, and whether it may ask for more. Pure; `now` in monotonic seconds.

    absent ── admit ──► under way ── settle ──► absent            a refusal changes nothing

A request is admitted as a whole: one request, the tokens that it is expected to take, one place among those under way.
What it took in the end is settled: the difference is given back, or becomes a debt that later requests wait for. So
refused requests cost nothing, and tokens are never charged twice or forgotten. A request that needs more than a whole
bucket is admitted when that is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.access.key_record import KeyLimits

MINUTE_S = 60.0
PRECISION_S = 1e-6
"""Whoever is so close to the instant is there: sums of doubles, and Redis' clock, are no more exact."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """`full_at` may lie in the past: it is full."""

    full_at: float = float("-inf")

    def wait_s(self, amount: float, capacity: int, now: float) -> float:
        """Until so much can be taken; 0 = now. An amount above the capacity needs a full bucket."""
        spare_s = max(0.0, capacity - amount) / capacity * MINUTE_S
        wait_s = self.full_at - now - spare_s
        return wait_s if wait_s > PRECISION_S else 0.0

    def after(self, amount: float, capacity: int, now: float) -> Bucket:
        """With so much taken; given back where it is negative."""
        return Bucket(max(self.full_at, now) + amount / capacity * MINUTE_S)

    def full_in_s(self, now: float) -> float:
        return max(0.0, self.full_at - now)


DEADLINE_S = 0.25
"""A request waits for the registry for this, and then goes by its own gateway's account."""
STREAM_TTL_S = 30.0
"""A gateway that died keeps its requests' places in the registry for this."""
STREAMS_RETRY_S = 1.0
"""When one under way ends cannot be known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Where one limit stands."""

    limit: int
    remaining: int
    reset_s: float  # until all of it is there again


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`refused_by` names the limit that has to be waited for longest; None = admitted. Without a limit no balance."""

    refused_by: str | None = None
    retry_after_s: float = 0.0
    requests: Balance | None = None
    tokens: Balance | None = None


@dataclass(slots=True, eq=False)
class _Account:
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    under_way: dict[str, int] = field(default_factory=dict)  # request id → tokens charged


class LimitState:
    """Accounts by key id. An account that says nothing any more is forgotten by `forget_idle`."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def look(self, key_id: str, limits: KeyLimits, now: float) -> Verdict:
        """Whether a request without tokens would be admitted now; charges nothing."""
        account = self._accounts.get(key_id) or _Account()
        return _judge(account, limits, 0, now)

    def admit(self, key_id: str, request_id: str, limits: KeyLimits, tokens: int, now: float) -> Verdict:
        """Charges the request if all limits have room for it. Request ids are unique."""
        account = self._accounts.setdefault(key_id, _Account())
        verdict = _judge(account, limits, tokens, now)
        if verdict.refused_by is not None:
            return verdict
        assert request_id not in account.under_way, "request ids are unique"
        account.under_way[request_id] = tokens
        if limits.requests_per_minute is not None:
            account.requests = account.requests.after(1, limits.requests_per_minute, now)
        _charge(account, limits, tokens, now)
        return _judge(account, limits, 0, now, refuses=False)

    def settle(self, key_id: str, request_id: str, limits: KeyLimits, tokens: int, now: float) -> None:
        """The request has ended and took so many tokens. No-op when it is not under way."""
        account = self._accounts.get(key_id)
        charged = None if account is None else account.under_way.pop(request_id, None)
        if account is not None and charged is not None:
            _charge(account, limits, tokens - charged, now)

    def withdraw(self, key_id: str, request_id: str, limits: KeyLimits, now: float) -> None:
        """As if the request had not been admitted: somebody else refused it."""
        self.settle(key_id, request_id, limits, 0, now)
        account = self._accounts.get(key_id)
        if account is not None and limits.requests_per_minute is not None:
            account.requests = account.requests.after(-1, limits.requests_per_minute, now)

    def forget_idle(self, now: float) -> None:
        """Accounts with full buckets and nothing under way are as new ones."""
        idle = [key_id for key_id, account in self._accounts.items() if _is_idle(account, now)]
        for key_id in idle:
            del self._accounts[key_id]

    def under_way(self) -> list[tuple[str, str]]:
        """(key id, request id) of what has not been settled."""
        return [(key, request) for key, a in self._accounts.items() for request in a.under_way]

    def validate(self) -> None:
        """Raises AssertionError where an account contradicts itself."""
        for account in self._accounts.values():
            assert all(tokens >= 0 for tokens in account.under_way.values())


def _judge(account: _Account, limits: KeyLimits, tokens: int, now: float, *, refuses: bool = True) -> Verdict:
    waits = {
        "requests": _wait_s(account.requests, 1, limits.requests_per_minute, now),
        "tokens": _wait_s(account.tokens, tokens, limits.tokens_per_minute, now),
        "streams": STREAMS_RETRY_S if limits.streams is not None and len(account.under_way) >= limits.streams else 0.0,
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
    """`waits`: for each limit. `full_in_s`: until the buckets of requests and of tokens are full."""
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
    return not account.under_way and all(bucket.full_at <= now for bucket in buckets)
