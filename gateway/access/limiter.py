"""Admission of requests by two accounts: this gateway's own first, then the one that all gateways share in Redis.

The own account decides alone without Redis or while Redis is away; a key may then use its limits once per gateway, but
never more. The own account sees only a part of the shared one, so a refusal by it needs no call. After a failed call
none is made for `REST_S`, so that a hanging Redis costs one request its deadline, not all.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.requests import Request

from gateway.access.key_record import KeyLimits
from gateway.access.limit_state import DEADLINE_S, LimitState, Verdict
from gateway.http.errors import ApiError
from gateway.tasks import LoggedTasks
from protocol.errors import MoonserveError

if TYPE_CHECKING:  # importing redis takes long
    from gateway.access.redis_stores import SharedLimits

log = logging.getLogger(__name__)

REST_S = 1.0
RENEW_EVERY_S = 10.0


class Limiter:
    """Limits of all keys. `clock` is monotonic."""

    def __init__(
        self,
        shared: SharedLimits | None,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = LimitState()
        self._shared = shared
        self._clock = clock
        self._away_until = float("-inf")
        self._settling = LoggedTasks()
        self._in_shared: dict[str, int] = {}  # request id → tokens charged in the shared account
        self._renewed = asyncio.Event()  # set while no renewal is running
        self._renewed.set()
        self._refusals = Counter(
            "moonserve_rate_limited",
            "Requests refused by a limit of their key.",
            ("limit",),
            registry=registry,
        )
        self._alone = Gauge(
            "moonserve_limits_unshared",
            "1 while the registry is away and each gateway limits for itself.",
            registry=registry,
        )

    def look(self, key_id: str, limits: KeyLimits) -> Verdict:
        """Returns the verdict on a request before any work is done for it. Does no I/O."""
        return self._counted(self.state.look(key_id, limits, self._clock()))

    async def admit(self, key_id: str, request_id: str, limits: KeyLimits, tokens: int) -> Verdict:
        """Charges the request if there is room for it; after that the caller must call `settle`."""
        own = self.state.admit(key_id, request_id, limits, tokens, self._clock())
        if own.refused_by is not None:
            return self._counted(own)
        try:
            shared = await self._ask(key_id, request_id, limits, tokens)
        except BaseException:
            self.state.withdraw(key_id, request_id, limits, self._clock())
            raise
        if shared is None:
            return own
        if shared.refused_by is not None:
            self.state.withdraw(key_id, request_id, limits, self._clock())
        return self._counted(shared)

    def settle(self, key_id: str, request_id: str, limits: KeyLimits, tokens: int) -> None:
        """Settles a request that has ended and used `tokens` tokens. Does not wait for the registry."""
        self.state.settle(key_id, request_id, limits, tokens, self._clock())
        charged = self._in_shared.pop(request_id, None)
        if self._shared is not None and charged is not None:
            settling = self._settle(self._shared, key_id, request_id, limits, tokens - charged)
            self._settling.start(self._bravely(settling), name=f"settle {request_id}")

    async def _settle(self, shared: SharedLimits, key_id: str, request_id: str, limits: KeyLimits, more: int) -> None:
        await self._renewed.wait()  # else its place might be renewed after its end
        await shared.settle(key_id, request_id, limits, more)

    async def run(self) -> None:
        """Renews requests in flight and forgets idle keys, until cancelled."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            self.state.forget_idle(self._clock())
            if self._shared is not None:
                await self._bravely(self._renew(self._shared))

    async def _renew(self, shared: SharedLimits) -> None:
        self._renewed.clear()
        try:
            under_way = [each for each in self.state.under_way() if each[1] in self._in_shared]
            await shared.renew(under_way)
        finally:
            self._renewed.set()

    async def close(self) -> None:
        await self._settling.drain(DEADLINE_S)
        await self._settling.cancel()
        if self._shared is not None:
            await self._shared.close()

    async def _ask(self, key_id: str, request_id: str, limits: KeyLimits, tokens: int) -> Verdict | None:
        """Returns the shared account's verdict, or None while it is away."""
        if self._shared is None or self._clock() < self._away_until:
            return None
        was_settling = len(self._settling) > 0  # it may be over when the verdict is here
        try:
            verdict = await self._shared.admit(key_id, request_id, limits, tokens)
            if verdict.refused_by == "streams" and was_settling:
                # Clients ask again as soon as they have the last byte, which may be before the registry is notified.
                await self._settling.drain(DEADLINE_S)
                verdict = await self._shared.admit(key_id, request_id, limits, tokens)
        except MoonserveError as error:
            self._rest(error)
            return None
        self._alone.set(0)
        if verdict.refused_by is None:
            self._in_shared[request_id] = tokens
        return verdict

    async def _bravely(self, call: Awaitable[None]) -> None:
        """Awaits a call that may fail: places in the registry then expire, and tokens stay charged."""
        try:
            await call
        except MoonserveError as error:
            self._rest(error)

    def _rest(self, error: MoonserveError) -> None:
        now = self._clock()
        if now >= self._away_until + REST_S:
            log.warning("limits are this gateway's own until the registry answers: %s", error)
        self._away_until = now + REST_S
        self._alone.set(1)

    def _counted(self, verdict: Verdict) -> Verdict:
        if verdict.refused_by is not None:
            self._refusals.labels(verdict.refused_by).inc()
        return verdict


_WORDS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "streams": "requests under way at once",
}


def headers_of(verdict: Verdict) -> dict[str, str]:
    """Returns `x-ratelimit-*` headers in lower case, only for limits that exist."""
    found: dict[str, str] = {}
    for name, balance in (("requests", verdict.requests), ("tokens", verdict.tokens)):
        if balance is not None:
            found[f"x-ratelimit-limit-{name}"] = str(balance.limit)
            found[f"x-ratelimit-remaining-{name}"] = str(balance.remaining)
            found[f"x-ratelimit-reset-{name}"] = duration(balance.reset_s)
    return found


def duration(seconds: float) -> str:
    """Formats a duration like OpenAI, rounded up: `17ms`, `1.5s`, `6m0s`."""
    ms = math.ceil(seconds * 1000 - 1e-6)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    shown = f"{ms / 1000:g}s"
    return f"{minutes}m{shown}" if minutes else shown


def refusal(verdict: Verdict) -> ApiError:
    """Returns the error 429 for a verdict that refuses."""
    assert verdict.refused_by is not None
    retry_after_s = max(1, math.ceil(verdict.retry_after_s - 1e-6))
    return ApiError(
        429,
        f"this key has reached its limit of {_WORDS[verdict.refused_by]}; try again in {retry_after_s} s",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": str(retry_after_s), **headers_of(verdict)},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of a request according to its key; empty if the gateway has no keys."""

    key_id: str = ""
    tenant: str | None = None  # None: keys do not name tenants
    priority: int | None = None  # the most urgent that it may have
    limits: KeyLimits = field(default_factory=KeyLimits)

    def priority_of(self, asked: int | None) -> int:
        """Returns the request's priority; lower is more urgent. The key's priority is both bound and default."""
        if self.priority is None:
            return asked or 0
        return self.priority if asked is None else max(asked, self.priority)


class Visit:
    """Admission of one HTTP request. `request_id` is unique in the cluster."""

    def __init__(self, identity: Identity, request_id: str, limiter: Limiter) -> None:
        self.identity = identity
        self.headers: dict[str, str] = {}  # of the reply
        self._request_id = request_id
        self._limiter = limiter
        self.used: Callable[[], int] | None = None  # returns the tokens used; called at the end
        self._is_admitted = False

    def look(self) -> None:
        """Raises ApiError (429) if a limit is already reached. Charges nothing."""
        if not self.identity.limits.is_unlimited:
            verdict = self._limiter.look(self.identity.key_id, self.identity.limits)
            if verdict.refused_by is not None:
                raise refusal(verdict)

    async def admit(self, prompt_tokens: int, output_tokens: int) -> None:
        """Charges the request with its expected tokens; at its end, `used` returns the actual number.

        Raises ApiError: 429 if a limit is reached, 400 if the prompt exceeds the limit and waiting cannot help.
        """
        limits = self.identity.limits
        if limits.is_unlimited:
            return
        if limits.tokens_per_minute is not None and prompt_tokens > limits.tokens_per_minute:
            raise ApiError(
                400,
                f"the prompt has {prompt_tokens} tokens, more than the {limits.tokens_per_minute} per minute that this "
                "key may use",
                code="tokens_per_minute_exceeded",
            )
        verdict = await self._limiter.admit(
            self.identity.key_id, self._request_id, limits, prompt_tokens + output_tokens
        )
        if verdict.refused_by is not None:
            raise refusal(verdict)
        self._is_admitted = True
        self.headers |= headers_of(verdict)

    def leave(self) -> None:
        """Settles the admission. Later calls do nothing."""
        if not self._is_admitted:
            return
        self._is_admitted = False
        tokens = 0 if self.used is None else self.used()
        self.used = None
        self._limiter.settle(self.identity.key_id, self._request_id, self.identity.limits, tokens)


def visit_of(request: Request) -> Visit:
    """Returns the visit that the middleware opened for this request."""
    visit: Visit = request.state.visit
    return visit
