"""Admission of requests by two accounts: this gateway's own first, then the one that all gateways share in Redis.

The own account decides alone without Redis or while Redis is away; a key may then use its limits once per gateway, but
never more. The own account sees only a part of the shared one, so a refusal by it needs no call. After a failed call
none is made for `BACK_OFF_S`, so that a hanging Redis costs one request its deadline, not all.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.requests import Request

from moonserve.gateway.access.api_key import KeyLimits
from moonserve.gateway.access.rate_limit_state import DEADLINE_S, RateLimitState, Verdict
from moonserve.gateway.access.tenant_isolation import Identity
from moonserve.gateway.errors import ApiError
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.process.event_loop import LoggedTasks

if TYPE_CHECKING:  # importing redis takes long
    from moonserve.gateway.access.redis_stores import RedisRateLimits

log = logging.getLogger(__name__)

BACK_OFF_S = 1.0
RENEW_EVERY_S = 10.0


class RateLimiter:
    """Limits of all keys. `clock` is monotonic."""

    def __init__(
        self,
        shared: "RedisRateLimits | None",
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = RateLimitState()
        self._shared = shared
        self._clock = clock
        self._back_off_until = float("-inf")
        self._settling = LoggedTasks()
        self._shared_charges: dict[str, int] = {}  # request id → tokens charged in the shared account
        self._renewed = asyncio.Event()  # set while no renewal is running
        self._renewed.set()
        self._refusals = Counter(
            "moonserve_rate_limited",
            "Requests refused by a limit of their key.",
            ("limit",),
            registry=registry,
        )
        self._unshared = Gauge(
            "moonserve_limits_unshared",
            "1 while the registry does not reply and each gateway applies the limits alone.",
            registry=registry,
        )

    def check(self, key_id: str, limits: KeyLimits) -> Verdict:
        """Returns the verdict on a request before any work is done for it. Does no I/O."""
        return self._counted(self.state.check(key_id, limits, self._clock()))

    async def admit(self, key_id: str, request_id: str, limits: KeyLimits, tokens: int) -> Verdict:
        """Charges the request if there is room for it; after that the caller must call `settle`."""
        own = self.state.admit(key_id, request_id, limits, tokens, self._clock())
        if own.refused_by is not None:
            return self._counted(own)
        try:
            shared = await self._admit_shared(key_id, request_id, limits, tokens)
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
        charged = self._shared_charges.pop(request_id, None)
        if self._shared is not None and charged is not None:
            settling = self._settle(self._shared, key_id, request_id, limits, tokens - charged)
            self._settling.start(self._tolerating_errors(settling), name=f"settle {request_id}")

    async def _settle(
        self, shared: "RedisRateLimits", key_id: str, request_id: str, limits: KeyLimits, more: int
    ) -> None:
        await self._renewed.wait()  # else its place might be renewed after its end
        await shared.settle(key_id, request_id, limits, more)

    async def run(self) -> None:
        """Renews requests in flight and forgets idle keys, until cancelled."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            self.state.forget_idle(self._clock())
            if self._shared is not None:
                await self._tolerating_errors(self._renew(self._shared))

    async def _renew(self, shared: "RedisRateLimits") -> None:
        self._renewed.clear()
        try:
            in_flight = [each for each in self.state.in_flight() if each[1] in self._shared_charges]
            await shared.renew(in_flight)
        finally:
            self._renewed.set()

    async def close(self) -> None:
        await self._settling.drain(DEADLINE_S)
        await self._settling.cancel()
        if self._shared is not None:
            await self._shared.close()

    async def _admit_shared(self, key_id: str, request_id: str, limits: KeyLimits, tokens: int) -> Verdict | None:
        """Returns the shared account's verdict, or None while it is away."""
        if self._shared is None or self._clock() < self._back_off_until:
            return None
        was_settling = len(self._settling) > 0  # it may be over when the verdict is here
        try:
            verdict = await self._shared.admit(key_id, request_id, limits, tokens)
            if verdict.refused_by == "streams" and was_settling:
                # Clients ask again as soon as they have the last byte, which may be before the registry is notified.
                await self._settling.drain(DEADLINE_S)
                verdict = await self._shared.admit(key_id, request_id, limits, tokens)
        except MoonserveError as error:
            self._back_off(error)
            return None
        self._unshared.set(0)
        if verdict.refused_by is None:
            self._shared_charges[request_id] = tokens
        return verdict

    async def _tolerating_errors(self, call: Awaitable[None]) -> None:
        """Awaits a call that may fail: places in the registry then expire, and tokens stay charged."""
        try:
            await call
        except MoonserveError as error:
            self._back_off(error)

    def _back_off(self, error: MoonserveError) -> None:
        now = self._clock()
        if now >= self._back_off_until + BACK_OFF_S:
            log.warning("the registry does not reply; this gateway applies the limits alone: %s", error)
        self._back_off_until = now + BACK_OFF_S
        self._unshared.set(1)

    def _counted(self, verdict: Verdict) -> Verdict:
        if verdict.refused_by is not None:
            self._refusals.labels(verdict.refused_by).inc()
        return verdict


_LIMIT_TEXTS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "streams": "concurrent requests",
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
        f"this key has reached its limit of {_LIMIT_TEXTS[verdict.refused_by]}; try again in {retry_after_s} s",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": str(retry_after_s), **headers_of(verdict)},
    )


class Admission:
    """Admission of one HTTP request. `request_id` is unique in the cluster."""

    def __init__(self, identity: Identity, request_id: str, limiter: RateLimiter) -> None:
        self.identity = identity
        self.headers: dict[str, str] = {}  # of the reply
        self._request_id = request_id
        self._limiter = limiter
        self.used: Callable[[], int] | None = None  # returns the tokens used; called at the end
        self._is_admitted = False

    def check(self) -> None:
        """Raises ApiError (429) if a limit is already reached. Charges nothing."""
        if not self.identity.limits.is_unlimited:
            verdict = self._limiter.check(self.identity.key_id, self.identity.limits)
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

    def settle(self) -> None:
        """Settles the admission. Later calls do nothing."""
        if not self._is_admitted:
            return
        self._is_admitted = False
        tokens = 0 if self.used is None else self.used()
        self.used = None
        self._limiter.settle(self.identity.key_id, self._request_id, self.identity.limits, tokens)


def admission_of(request: Request) -> Admission:
    """Returns the admission that the middleware opened for this request."""
    admission: Admission = request.state.admission
    return admission
