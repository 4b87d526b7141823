"""The conductors of a cluster as its other processes know them: calls reach the one that leads.

Rules: an address that leads is asked, and while it is the only one no more is decided. Whoever does not lead says so
and names the leader; a call that met no leader is made again until its deadline; a leader that is silent is believed
in until another one says that it leads, since giving up a slow one helps nobody. Calls that are given up are cancelled,
so that a late answer of a former leader reaches nobody. Calls must be such that making them twice is harmless. Knows
no registry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from protocol.errors import ConfigError, MoonserveError, NotLeader, PeerLost
from protocol.pb import conductor_pb2_grpc, leadership_pb2, leadership_pb2_grpc
from protocol.process import running
from protocol.rpc import Channels

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")
Stub: TypeAlias = "conductor_pb2_grpc.ConductorAsyncStub"

PATIENCE_S = 0.3
"""Silence after which the others are asked, again and again; a placement takes milliseconds."""
ASK_TIMEOUT_S = 0.5
RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """Who said that it leads, and the epoch of its claim."""

    address: str
    epoch: int


def parse_addresses(text: str) -> tuple[str, ...]:
    """From `--conductor`: one `host:port` or several with commas between. Raises ConfigError."""
    addresses = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()):
            raise ConfigError(f"--conductor {text!r} must be host:port, or several with commas between")
    return addresses


class Conductors:
    """One client of the conductors at `addresses` (see `parse_addresses`). Used in one event loop."""

    def __init__(self, channels: Channels, addresses: str) -> None:
        self._channels = channels
        self._addresses = parse_addresses(addresses)
        self._is_alone = len(self._addresses) == 1  # and never spoke of a leader
        self._leader: Leader | None = None
        self._newest_epoch = 0  # of all leaders so far
        self._hinted: str | None = None  # the last leader's; the operator may not have named it
        self._search: asyncio.Task[Leader | None] | None = None  # shared by all calls that wait

    async def call(
        self,
        method: Callable[[Stub], Callable[..., Awaitable[Reply]]],
        request: object,
        *,
        timeout_s: float,
        wait_for_ready: bool = False,
    ) -> Reply:
        """`lambda conductor: conductor.Place` and its request. Raises what the leader raised, PeerLost when no
        conductor answered in time, NotLeader when none of them led."""
        if self._is_alone:
            try:
                chosen = method(self._stub(self._addresses[0]))
                return await self._channels.call(chosen, request, timeout_s=timeout_s, wait_for_ready=wait_for_ready)
            except NotLeader:
                self._is_alone = False
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        while True:
            remaining_s = max(give_up_at - loop.time(), RETRY_S)
            try:
                return await self._call_once(method, request, remaining_s)
            except (NotLeader, PeerLost) as error:
                if loop.time() + RETRY_S >= give_up_at:
                    raise
                log.debug("asking again: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _call_once(
        self,
        method: Callable[[Stub], Callable[..., Awaitable[Reply]]],
        request: object,
        timeout_s: float,
    ) -> Reply:
        leader = self._leader or await self._find()
        if leader is None:
            raise NotLeader(f"none of the conductors {', '.join(self._addresses)} leads")
        chosen = method(self._stub(leader.address))
        call = self._channels.call(chosen, request, timeout_s=timeout_s)
        try:
            async with running(call) as answer:
                await self._until_answered(answer, leader)
                return answer.result()
        except (NotLeader, PeerLost):
            if self._leader == leader:
                self._leader = None
            raise

    async def _until_answered(self, answer: asyncio.Task[Reply], leader: Leader) -> None:
        """Raises PeerLost when another one leads meanwhile."""
        while True:
            await asyncio.wait({answer}, timeout=PATIENCE_S)
            if answer.done():
                return
            # Another call may have found one meanwhile, whom a search would then leave out.
            successor = self._leader if self._leader != leader else None
            successor = successor or await self._find()
            if successor is not None and successor != leader and not answer.done():
                raise PeerLost(f"{leader.address} is silent, and {successor.address} leads instead of it")

    async def _find(self) -> Leader | None:
        """Who leads, by their own word; asks all at once, and once for all who wait."""
        if self._search is None or self._search.done():
            self._search = asyncio.create_task(self._ask_all())
        # One caller's cancellation is not the others'.
        found = await asyncio.shield(self._search)
        if found is not None and found != self._leader:
            log.info("%s leads, epoch %d", found.address, found.epoch)
            self._leader = found
        return found

    async def _ask_all(self) -> Leader | None:
        newest = self._newest_epoch
        known = dict.fromkeys((*self._addresses, *filter(None, (self._hinted,))))
        if self._leader is not None:  # it is silent, and waited for already
            known.pop(self._leader.address, None)
        found, hints = await self._ask(tuple(known))
        if found is None or found.epoch < newest:
            unknown = hints - {"", *self._addresses, self._hinted}
            if unknown:  # a conductor that was started after us
                hinted, _ = await self._ask(tuple(unknown))
                found = max(filter(None, (found, hinted)), key=_epoch, default=None)
        if found is not None:
            self._newest_epoch = max(newest, found.epoch)
            self._hinted = found.address
        return found

    async def _ask(self, addresses: tuple[str, ...]) -> tuple[Leader | None, set[str]]:
        """The one that leads, and whom the others take for it. One that is no earlier than the last leader ends the
        asking: a dead one would be waited for in vain."""
        found: Leader | None = None
        hints: set[str] = set()
        if not addresses:
            return found, hints
        questions = [asyncio.create_task(self._who(address)) for address in addresses]
        try:
            for question in asyncio.as_completed(questions):
                address, reply = await question
                if reply is None:
                    continue
                hints.add(reply.leader_address)
                if reply.leads and (found is None or reply.epoch > found.epoch):
                    found = Leader(address=address, epoch=reply.epoch)
                    if 0 < self._newest_epoch <= found.epoch:
                        break
        finally:
            for question in questions:
                question.cancel()
            await asyncio.wait(questions)
        return found, hints

    async def _who(self, address: str) -> tuple[str, leadership_pb2.WhoReply | None]:
        request = leadership_pb2.WhoRequest()
        try:
            stub: leadership_pb2_grpc.LeadershipAsyncStub = leadership_pb2_grpc.LeadershipStub(
                self._channels.to(address)
            )
            return address, await self._channels.call(stub.Who, request, timeout_s=ASK_TIMEOUT_S)
        except MoonserveError as error:
            log.debug("%s does not say who leads: %s", address, error)
            return address, None

    def _stub(self, address: str) -> Stub:
        stub: Stub = conductor_pb2_grpc.ConductorStub(self._channels.to(address))
        return stub


def _epoch(leader: Leader) -> int:
    return leader.epoch
