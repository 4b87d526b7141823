"""Shell of one leadership candidate: sends the registry requests of `LeadershipState` and returns the answers to it.

The claim is a registry member that all candidates try to join as. Its id is the same for all, its owner is new at every
start, and its endpoint is the leader's address. A request times out when the next one would be due.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from conductor.leadership.state import (
    Answer,
    BeginLeading,
    Claim,
    Claimed,
    Event,
    LeadershipState,
    Lost,
    Refused,
    RegistrySilent,
    Renew,
    Renewed,
    StepDown,
    Terms,
    Tick,
)
from protocol.errors import (
    Incompatible,
    InvalidRequest,
    MoonserveError,
    StaleLease,
    Unauthenticated,
)
from protocol.membership import own_endpoint
from protocol.registry.base import Member, Registry

log = logging.getLogger(__name__)

CLAIM_ID = "conductor-leader"
ROLE = "conductor"
LEAVE_TIMEOUT_S = 0.5


def boot_clock() -> float:
    """Returns seconds since boot, including suspend, because a claim also expires while the machine is suspended."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class Candidate:
    """One candidate. Calls `begin(epoch)` and `step_down(reason)` in the event loop."""

    def __init__(
        self,
        registry: Registry,
        address: str,
        terms: Terms,
        *,
        begin: Callable[[int], None],
        step_down: Callable[[str], None],
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self.address = address
        self._state = LeadershipState(terms, due_at=clock())
        self._registry = registry
        self._begin = begin
        self._step_down = step_down
        self._clock = clock
        # The registry assigns the epoch, above 0.
        endpoint = own_endpoint(CLAIM_ID, rpc_address=address, transfer_address="")
        self._member = Member(
            endpoint=dataclasses.replace(endpoint, epoch=0),
            role=ROLE,
            owner=secrets.token_hex(8),
        )
        self._question: asyncio.Task[Answer] | None = None
        self._was_heard = False  # the registry has answered at least once
        self._is_silent = False  # the registry did not answer the last request
        self._has_ended = False

    @property
    def leads(self) -> bool:
        """True if this candidate leads now, by its own clock."""
        return not self._has_ended and self._state.leads(self._clock())

    @property
    def epoch(self) -> int:
        """The highest epoch seen; while this candidate leads, that of its claim."""
        return self._state.known_epoch

    @property
    def other_address(self) -> str | None:
        """Address of another conductor that leads; None = unknown."""
        return self._state.leader_address

    async def run(self) -> None:
        """Runs until cancelled, then gives up the claim.

        Raises Unauthenticated, InvalidRequest or Incompatible if that is the registry's first answer, since a retry
        cannot help then.
        """
        try:
            while True:
                self._take(Tick())
                await self._until_due()
                if self._question is not None and self._question.done():
                    answer, self._question = self._question.result(), None
                    self._take(answer)
        finally:
            await self._end()

    def _take(self, event: Event) -> None:
        for action in self._state.handle(event, self._clock()):
            match action:
                case Claim():
                    self._ask(self._claim(action.known_epoch))
                case Renew():
                    self._ask(self._renew(action.epoch))
                case BeginLeading():
                    log.info("leads, epoch %d", action.epoch)
                    self._begin(action.epoch)
                case StepDown():
                    log.warning("leads no more, epoch %d: %s", action.epoch, action.reason)
                    self._step_down(action.reason)

    async def _until_due(self) -> None:
        delay_s = max(0.0, self._state.due_at - self._clock())
        if self._question is None:
            await asyncio.sleep(delay_s)
        else:
            await asyncio.wait({self._question}, timeout=delay_s)

    def _ask(self, question: Coroutine[Any, Any, Answer]) -> None:
        assert self._question is None, "one question at a time"
        self._question = asyncio.create_task(self._answered(question))

    async def _answered(self, question: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            async with asyncio.timeout(self._state.terms.renew_every_s):
                answer = await question
        except (Unauthenticated, InvalidRequest, Incompatible) as error:
            if not self._was_heard:
                raise
            return self._silence(error.message)
        except MoonserveError as error:
            return self._silence(error.message)
        except TimeoutError:
            return self._silence("no answer in time")
        if self._is_silent:
            log.info("the registry can be used again")
        self._was_heard, self._is_silent = True, False
        return answer

    def _silence(self, reason: str) -> RegistrySilent:
        if not self._is_silent:
            log.warning("the registry cannot be used: %s", reason)
        self._is_silent = True
        return RegistrySilent(reason=reason)

    async def _claim(self, known_epoch: int) -> Answer:
        try:
            joined = await self._registry.join(self._with_epoch(known_epoch), ttl_s=self._state.terms.ttl_s)
        except StaleLease as error:
            return await self._refused(error.retry_after_s or 0.0)
        return Claimed(epoch=joined.endpoint.epoch)

    async def _refused(self, retry_after_s: float) -> Refused:
        """Returns a refusal with the leader's address, which this candidate's callers are given."""
        with contextlib.suppress(MoonserveError):
            for member in await self._registry.members():
                if member.instance_id == CLAIM_ID:
                    return Refused(
                        retry_after_s=retry_after_s,
                        leader_address=member.endpoint.rpc_address,
                        epoch=member.endpoint.epoch,
                    )
        return Refused(retry_after_s=retry_after_s, leader_address=None, epoch=0)

    async def _renew(self, epoch: int) -> Answer:
        try:
            await self._registry.renew(self._with_epoch(epoch), ttl_s=self._state.terms.ttl_s)
        except StaleLease as error:
            return Lost(reason=error.message)
        return Renewed()

    def _with_epoch(self, epoch: int) -> Member:
        endpoint = dataclasses.replace(self._member.endpoint, epoch=epoch)
        return dataclasses.replace(self._member, endpoint=endpoint)

    async def _end(self) -> None:
        """Stops leading, then gives up the claim. No registry request is in flight afterwards."""
        self._has_ended = True
        if self._question is not None:
            self._question.cancel()
            await asyncio.wait({self._question})
        with contextlib.suppress(MoonserveError, TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._registry.leave(self._with_epoch(self._state.epoch))
