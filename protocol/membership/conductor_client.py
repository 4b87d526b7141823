"""Client of a cluster's conductors that sends each call to the current leader, or, where all of them are active, to the
one that it concerns (`sharded_conductors`).

With a single configured address, calls go there directly until it answers NotLeader. Conductors that do not lead say
so and name the leader. A call that finds no leader is retried until its deadline. A silent leader is kept until
another conductor claims to lead, because abandoning a slow leader gains nothing. An abandoned call is cancelled, so
that the late answer of a former leader is dropped. Calls must be safe to repeat. This module does not know the
registry.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from moonserve.protocol.errors import ConfigError, MoonserveError, NotLeader, PeerLost
from moonserve.protocol.membership.sharded_conductors import ShardedConductors, Stub
from moonserve.protocol.pb import conductor_pb2_grpc, leadership_pb2, leadership_pb2_grpc
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.rpc.grpc_transport import Channels

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")
Method: TypeAlias = Callable[[Stub], Callable[..., Awaitable[Reply]]]

SILENT_LEADER_S = 0.3
"""Interval at which the other conductors are queried while a leader is silent. A placement takes milliseconds."""
WHO_TIMEOUT_S = 0.5
RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """Conductor that claims to lead, and the epoch of its claim."""

    address: str
    epoch: int


def parse_addresses(text: str) -> tuple[str, ...]:
    """Parses `--conductor`: one `host:port`, or several separated by commas. Raises ConfigError if one is malformed."""
    addresses = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()):
            raise ConfigError(f"--conductor {text!r} must be host:port, or several separated by commas")
    return addresses


class ConductorClient:
    """Client of the conductors at `addresses` (see `parse_addresses`). It belongs to one event loop."""

    def __init__(self, channels: Channels, addresses: str) -> None:
        self._channels = channels
        self._addresses = parse_addresses(addresses)
        self._is_single = len(self._addresses) == 1  # until it answers NotLeader
        self._leader: Leader | None = None
        self._newest_epoch = 0  # highest epoch of all leaders so far
        self._last_leader_address: str | None = None  # address of the last leader; it may not be in the configuration
        self._sharded: ShardedConductors | None = None  # once a conductor says that all are active
        self._search: asyncio.Task[Leader | None] | None = None  # shared by all waiting calls

    async def call(
        self, method: Method[Reply], request: object, *, timeout_s: float, wait_for_ready: bool = False
    ) -> Reply:
        """Calls a method of the leader and returns its reply. `method` picks it: `lambda conductor: conductor.Place`.

        Raises the leader's error, PeerLost if no conductor answers in time, or NotLeader if none of them leads."""
        if self._is_single:
            try:
                chosen = method(self._stub(self._addresses[0]))
                return await self._channels.call(chosen, request, timeout_s=timeout_s, wait_for_ready=wait_for_ready)
            except NotLeader:
                self._is_single = False
        loop = asyncio.get_running_loop()
        deadline_at = loop.time() + timeout_s
        while True:
            remaining_s = max(deadline_at - loop.time(), RETRY_S)
            try:
                return await self._call_once(method, request, remaining_s)
            except (NotLeader, PeerLost) as error:
                if loop.time() + RETRY_S >= deadline_at:
                    raise
                log.debug("calling again: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _call_once(self, method: Method[Reply], request: object, timeout_s: float) -> Reply:
        leader = self._leader
        if leader is None and self._sharded is None:
            leader = await self._find()
        if self._sharded is not None:
            reply: Reply = await self._sharded.call(method, request, timeout_s)
            return reply
        if leader is None:
            raise NotLeader(f"none of the conductors {', '.join(self._addresses)} leads")
        call = self._channels.call(method(self._stub(leader.address)), request, timeout_s=timeout_s)
        try:
            async with background_task(call) as answer:
                await self._until_answered(answer, leader)
                return answer.result()
        except (NotLeader, PeerLost):
            if self._leader == leader:
                self._leader = None
            raise

    async def _until_answered(self, answer: asyncio.Task[Reply], leader: Leader) -> None:
        """Waits for the answer. Raises PeerLost if another conductor leads in the meantime."""
        while True:
            await asyncio.wait({answer}, timeout=SILENT_LEADER_S)
            if answer.done():
                return
            # Another call may have found the successor already; a search skips the current leader.
            successor = self._leader if self._leader != leader else None
            successor = successor or await self._find()
            if successor is not None and successor != leader and not answer.done():
                raise PeerLost(f"{leader.address} is silent, and {successor.address} leads instead")

    async def _find(self) -> Leader | None:
        """Returns the conductor that claims to lead. Queries all others at once; waiting calls share one query."""
        if self._search is None or self._search.done():
            self._search = asyncio.create_task(self._query_all())
        # The cancellation of one caller must not end the query of the others.
        found = await asyncio.shield(self._search)
        if found is not None and found != self._leader:
            log.info("conductor %s leads with epoch %d", found.address, found.epoch)
            self._leader = found
        return found

    async def _query_all(self) -> Leader | None:
        newest = self._newest_epoch
        known = dict.fromkeys((*self._addresses, *filter(None, (self._last_leader_address,))))
        if self._leader is not None:  # silent; a call to it is already in flight
            known.pop(self._leader.address, None)
        found, hints = await self._query(tuple(known))
        if found is None or found.epoch < newest:
            unknown = hints - {"", *self._addresses, self._last_leader_address}
            if unknown:  # a conductor that was started after this process
                hinted, _ = await self._query(tuple(unknown))
                found = max(filter(None, (found, hinted)), key=_epoch, default=None)
        if found is not None:
            self._newest_epoch = max(newest, found.epoch)
            self._last_leader_address = found.address
        return found

    async def _query(self, addresses: tuple[str, ...]) -> tuple[Leader | None, set[str]]:
        """Returns the leader, and the leader addresses that the conductors named.

        A leader whose epoch is not below the last known one ends the query, so that dead conductors are not awaited."""
        found: Leader | None = None
        hints: set[str] = set()
        if not addresses:
            return found, hints
        queries = [asyncio.create_task(self._who(address)) for address in addresses]
        try:
            for query in asyncio.as_completed(queries):
                address, reply = await query
                if reply is None:
                    continue
                if reply.is_shard:
                    self._sharded = self._sharded or ShardedConductors(self._channels, self._addresses)
                    break
                hints.add(reply.leader_address)
                if reply.leads and (found is None or reply.epoch > found.epoch):
                    found = Leader(address=address, epoch=reply.epoch)
                    if 0 < self._newest_epoch <= found.epoch:
                        break
        finally:
            for query in queries:
                query.cancel()
            await asyncio.wait(queries)
        return found, hints

    async def _who(self, address: str) -> tuple[str, leadership_pb2.WhoReply | None]:
        request = leadership_pb2.WhoRequest()
        try:
            stub: leadership_pb2_grpc.LeadershipAsyncStub = leadership_pb2_grpc.LeadershipStub(
                self._channels.to(address)
            )
            return address, await self._channels.call(stub.Who, request, timeout_s=WHO_TIMEOUT_S)
        except MoonserveError as error:
            log.debug("conductor %s does not say which one leads: %s", address, error)
            return address, None

    def _stub(self, address: str) -> Stub:
        stub: Stub = conductor_pb2_grpc.ConductorStub(self._channels.to(address))
        return stub


def _epoch(leader: Leader) -> int:
    return leader.epoch
