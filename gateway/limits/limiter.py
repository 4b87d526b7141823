"""Asks for a request's admission: this gateway's own account first, then the one that all gateways share.

The own account decides alone where there is no Redis, and while it is away: then a key may have its limits once per
gateway, but never more. It sees only a part of what the shared one sees, so that what it refuses needs no question.
Failing calls are not repeated for `REST_S`, so that a Redis that hangs costs one request its deadline, not all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.keys.record import KeyLimits
from gateway.limits.state import LimitState, Verdict
from gateway.tasks import TaskGroup
from protocol.errors import MoonserveError

log = logging.getLogger(__name__)

DEADLINE_S = 0.25
"""A request waits for the registry for this, and then goes by its own gateway's account."""
REST_S = 1.0
STREAM_TTL_S = 30.0
"""A gateway that died keeps its requests' places for this."""
RENEW_EVERY_S = 10.0


class SharedAccounts(Protocol):
    """`gateway.limits.shared`, which costs an import of redis. Methods raise PeerError within their deadline."""

    async def admit(
        self, key_id: str, request_id: str, limits: KeyLimits, tokens: int
    ) -> Verdict: ...

    async def settle(
        self, key_id: str, request_id: str, limits: KeyLimits, more_tokens: int
    ) -> None: ...

    async def renew(self, under_way: Iterable[tuple[str, str]]) -> None: ...

    async def close(self) -> None: ...


class Limiter:
    """Limits of all keys. `clock` is monotonic."""

    def __init__(
        self,
        shared: SharedAccounts | None,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = LimitState()
        self._shared = shared
        self._clock = clock
        self._away_until = float("-inf")
        self._settling = TaskGroup()
        self._in_shared: dict[str, int] = {}  # request id → tokens charged there
        self._renewed = asyncio.Event()  # none is being renewed
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
        """Whether a request has a chance, before anything is done for it. Without I/O."""
        return self._counted(self.state.look(key_id, limits, self._clock()))

    async def admit(self, key_id: str, request_id: str, limits: KeyLimits, tokens: int) -> Verdict:
        """Charges the request if there is room for it; then `settle` must follow."""
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
        """The request has ended and took so many tokens. Does not wait for the registry."""
        self.state.settle(key_id, request_id, limits, tokens, self._clock())
        charged = self._in_shared.pop(request_id, None)
        if self._shared is not None and charged is not None:
            settling = self._settle(self._shared, key_id, request_id, limits, tokens - charged)
            self._settling.start(self._bravely(settling), name=f"settle {request_id}")

    async def _settle(
        self, shared: SharedAccounts, key_id: str, request_id: str, limits: KeyLimits, more: int
    ) -> None:
        await self._renewed.wait()  # else its place might be renewed behind its end
        await shared.settle(key_id, request_id, limits, more)

    async def run(self) -> None:
        """Until cancelled: renews what is under way, forgets who is idle."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            self.state.forget_idle(self._clock())
            if self._shared is not None:
                await self._bravely(self._renew(self._shared))

    async def _renew(self, shared: SharedAccounts) -> None:
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

    async def _ask(
        self, key_id: str, request_id: str, limits: KeyLimits, tokens: int
    ) -> Verdict | None:
        """The shared account's verdict; None while it is away."""
        if self._shared is None or self._clock() < self._away_until:
            return None
        was_settling = len(self._settling) > 0  # it may be over when the verdict is here
        try:
            verdict = await self._shared.admit(key_id, request_id, limits, tokens)
            if verdict.refused_by == "streams" and was_settling:
                # Clients ask again as soon as they have the last byte, which may be before the registry knows.
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
        """What cannot be told to the registry ends there by itself: places by their time, tokens stay charged."""
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
