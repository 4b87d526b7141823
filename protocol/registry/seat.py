"""Keeps a process's membership in the registry: joins, renews the lease, and joins again if the registry forgot it.

An unreachable registry ends nothing; it is only logged, once. A later epoch of another process under the same id ends
the seat, because two processes must not take the id from each other forever. A caller publishes the epoch of the last
join. A join whose answer was lost may still be performed, so each seat marks its joins and adopts a later epoch that is
its own. The module does not know what the process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from protocol.errors import (
    ConfigError,
    Incompatible,
    InvalidRequest,
    MoonserveError,
    StaleLease,
    Unauthenticated,
)
from protocol.process import running
from protocol.registry.base import RENEW_EVERY_S, TTL_S, Member, Registry, Superseded

log = logging.getLogger(__name__)

T = TypeVar("T")

MARGIN_S = 0.05
"""Wait after the end of another owner's lease, since both sides round to milliseconds and timers may fire early."""

LIFE_FACT = "life"
"""Name of the fact that differs between seats, while the owner token stays the same over restarts."""


class Seat:
    """Membership of one process in the registry.

    `on_epoch` is called after each join, in the loop's thread, with the member as the registry has it. `before_rejoin`
    is awaited before the join of a forgotten member, with the seconds since the registry last confirmed it. Other
    processes do not see the member again before it returns.
    """

    def __init__(
        self,
        registry: Registry,
        member: Member,
        *,
        ttl_s: float = TTL_S,
        renew_every_s: float = RENEW_EVERY_S,
        on_epoch: Callable[[Member], None] | None = None,
        before_rejoin: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        self._life = secrets.token_hex(8)
        self.member = dataclasses.replace(member, facts={**member.facts, LIFE_FACT: self._life})
        """The member, with the epoch of the last join."""
        self.joined = asyncio.Event()
        """Set by the first join, and never cleared."""
        self._registry = registry
        self._ttl_s = ttl_s
        self._renew_every_s = renew_every_s
        self._retry_s = renew_every_s / 3
        self._on_epoch = on_epoch
        self._before_rejoin = before_rejoin
        self._held_at = asyncio.get_running_loop().time()
        self._away = False
        self._forgotten = False  # the registry has no lease of this member; it must join again

    async def run(self) -> None:
        """Joins and renews until cancelled. Raises StaleLease if the id belongs to another process for good, and other
        errors that a retry cannot fix, such as Unauthenticated at the first join."""
        await self._take_first()
        while True:
            await asyncio.sleep(self._renew_every_s)
            await self._persist(self._renew)

    @property
    def silence_s(self) -> float:
        """Seconds since the registry last confirmed the membership, or since the start."""
        return asyncio.get_running_loop().time() - self._held_at

    async def leave(self) -> None:
        """Leaves the registry, best effort: otherwise the lease ends the membership. Must not overlap with `run`."""
        if not self.joined.is_set():
            return
        try:
            await self._registry.leave(self.member)
        except MoonserveError as error:
            log.info("left without a word: %s", error)

    async def _take_first(self) -> None:
        """Joins, and waits once for another owner's lease, which may be that of this process before its restart."""
        try:
            await self._persist(self._take)
            return
        except StaleLease as error:
            log.warning("waiting for the id: %s", error)
            await asyncio.sleep((error.retry_after_s or 0.0) + MARGIN_S)
        await self._take_second()

    async def _take_second(self) -> None:
        try:
            await self._persist(self._take)
        except StaleLease as error:
            raise StaleLease(
                f"{self.member.instance_id} belongs to another process, which keeps renewing it; "
                f"stop that one or give this one another id ({error.message})",
                **error.ids,
            ) from error

    async def _renew(self) -> None:
        if self._forgotten:
            await self._take_again()
            return
        asked_at = asyncio.get_running_loop().time()
        try:
            await self._registry.renew(self.member, ttl_s=self._ttl_s)
            self._held_at = asked_at
        except Superseded as error:
            await self._follow(error)
        except StaleLease:
            log.warning("the registry has no lease of %s, joining again", self.member.instance_id)
            self._forgotten = True
            await self._take_again()

    async def _take_again(self) -> None:
        if self._before_rejoin is not None:
            await self._before_rejoin(self.silence_s)
        try:
            await self._take()
        except StaleLease as error:
            raise self._lost(error) from error

    async def _take(self) -> None:
        asked_at = asyncio.get_running_loop().time()
        self._hold(await self._registry.join(self.member, ttl_s=self._ttl_s))
        self._held_at = asked_at

    async def _follow(self, error: Superseded) -> None:
        """Adopts the later epoch if it is from a join of this seat whose answer was lost; else raises StaleLease."""
        for member in await self._registry.members():
            ours = member.instance_id == self.member.instance_id
            if ours and member.facts.get(LIFE_FACT) == self._life:
                self._hold(member)
                return
        raise self._lost(error) from error

    def _hold(self, member: Member) -> None:
        self.member = member
        self._forgotten = False
        log.info("joined as %s, epoch %d", member.instance_id, member.endpoint.epoch)
        self.joined.set()
        if self._on_epoch is not None:
            self._on_epoch(member)

    async def _persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats `call` until it succeeds or raises an error that a retry cannot fix."""
        while True:
            try:
                result = await call()
            except MoonserveError as error:
                if self._is_final(error):
                    raise
                if not self._away:
                    log.warning("registry cannot be used, going on without it: %s", error)
                self._away = True
                await asyncio.sleep(self._retry_s)
                continue
            if self._away:
                log.info("registry can be used again")
            self._away = False
            return result

    def _is_final(self, error: MoonserveError) -> bool:
        """Returns true if a retry cannot help. A process that has joined keeps trying after a change of password."""
        if isinstance(error, Unauthenticated):
            return not self.joined.is_set()
        return isinstance(error, StaleLease | InvalidRequest | Incompatible | ConfigError)

    def _lost(self, error: StaleLease) -> StaleLease:
        return StaleLease(
            f"{self.member.instance_id} was taken by another process, this one must end: {error.message}",
            **error.ids,
        )


@contextlib.asynccontextmanager
async def seated(seat: Seat) -> AsyncIterator[asyncio.Task[None]]:
    """Keeps the seat within the block and leaves after it. The yielded task ends with an error if the seat is lost."""
    async with running(seat.run()) as task:
        try:
            yield task
        finally:
            # Leave only after the task has ended: a later join of the task would take the seat again.
            task.cancel()
            await asyncio.wait({task})
            await seat.leave()
