"""A node of a cluster hears from the others what was removed, and what was stored anew, while it did not listen.

All the time it asks a few of them what is new, so that what one node was told all know within seconds, also one that
did not answer when a key was removed. A node that starts, or that the registry had forgotten, asks all of them *before*
what it had before is seen again. When nobody can answer for the whole of its absence, all of that goes: nothing wrong
goes before nothing lost. Knows no clients; with a conductor instead of a registry, keys are made from their contents.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.disk.base import DiskObject
from kvstore.remembering import Remembering
from kvstore.removals import Heard
from kvstore.state import StoreState
from kvstore.verification import batched
from kvstore.wire import entries_from_wire
from protocol.errors import MoonserveError
from protocol.keys import BlockKey, unpack_keys
from protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from protocol.registry.base import TTL_S, Member, Registry
from protocol.registry.seat import Seat
from protocol.rpc import Channels


@dataclass(frozen=True, slots=True)
class Answer:
    """A node has told all its removals; for how long back it knows all there were."""

    settled: bool  # False: it was away itself, and asks as well
    covered_s: float


def covered_s(answers: Sequence[Answer | None]) -> float:
    """How far back all removals are known once these nodes were heard."""
    return max((a.covered_s for a in answers if a is not None and a.settled), default=0.0)


def may_stay(absent_s: float, answers: Sequence[Answer | None]) -> bool | None:
    """One answer for each other node, None where it did not give one; None = ask again.

    It may when one of them knows all of the absence, or when nobody was there: no other node, or only such as were
    away too. It may not when all who are there know less: nothing wrong goes before nothing lost.
    """
    settled = any(answer is not None and answer.settled for answer in answers)
    if settled and covered_s(answers) >= absent_s:
        return True
    return None if None in answers else not settled


log = logging.getLogger(__name__)

STORE_ROLE = "store"
PULL_EVERY_S = 1.0
FANOUT = 4
"""Nodes asked each time: what one knows reaches all of n in about log(n) rounds."""
CALL_S = 2.0
RETRY_S = 0.3
FENCE_S = 2 * TTL_S
"""As long as nodes that died may still be named by the registry, and again as much."""
PRESENCE_EVERY_S = 5.0
COMPARED_AT_ONCE = 4_096
COMPARE_S = 3.0
"""Before a running node is a member again; the rest is compared behind the scenes."""


class CatchingUp:
    """What a recovery asks, and what a seat does before it joins again. Belongs to one event loop."""

    def __init__(
        self,
        instance_id: str,
        registry: Registry,
        remembering: Remembering,
        state: StoreState,
        channels: Channels,
    ) -> None:
        self._instance_id = instance_id
        self.registry = registry
        self._remembering = remembering
        self._state = state
        self._channels = channels
        remembering.settled = False
        self._cursors: dict[str, tuple[int, int]] = {}
        """How much of a node's removals is known here: in which of its lives, up to which number."""
        self._peers: list[Member] = []
        self._turn = 0
        self._decided = asyncio.Event()
        self._may_stay = False
        self._has_begun_empty = False  # since the start: what is still found on disk goes, too
        self._covered_s = 0.0  # by the best of those who were asked last
        self._comparing: asyncio.Task[None] | None = None

    async def run(self, seat: Seat) -> None:
        """Beside the seat, until cancelled."""
        try:
            await seat.joined.wait()
            await self._settle()
            noted_at = float("-inf")
            while True:
                loop = asyncio.get_running_loop()
                is_due = loop.time() - noted_at >= PRESENCE_EVERY_S
                if is_due and seat.silence_s < TTL_S and self._leaves_nothing():
                    noted_at = loop.time()
                    await self._remembering.note_presence()
                await asyncio.sleep(PULL_EVERY_S)
                await self._gossip()
        finally:
            if self._comparing is not None:
                self._comparing.cancel()

    async def close(self) -> None:
        """Nothing runs any more."""
        await self._channels.close()
        await self.registry.close()

    # What this node had before it listened again

    async def begin(self) -> bool:
        """Returns once it can be told what of the disk may be used; False = nothing of it."""
        await self._decided.wait()
        return self._may_stay

    async def outdated(self, found: Sequence[DiskObject]) -> set[BlockKey]:
        """Those of which another value has been stored elsewhere."""
        replaced = await self._replaced(found)
        return {about.key for about in found} if self._has_begun_empty else replaced

    async def before_rejoin(self, absent_s: float) -> None:
        """The registry had forgotten this node. Raises MoonserveError when the registry does not answer."""
        had_before = self._state.catalog.latest_generation + 1
        if not await self._fence(absent_s):
            log.error("nobody knows what was removed in the last %.0f s: beginning empty", absent_s)
            self._has_begun_empty = True
            self._remembering.drop([o.header() for o in self._state.catalog.objects()])
            self._remembering.knows_only(self._covered_s)
            return
        if self._comparing is not None:
            self._comparing.cancel()  # what it has compared may have been stored anew since
        self._comparing = asyncio.create_task(self._compare(had_before))
        await asyncio.wait({self._comparing}, timeout=COMPARE_S)

    async def _compare(self, had_before: int) -> None:
        """All that is here and was before; may take long."""
        for piece in batched(self._state.catalog.objects(), COMPARED_AT_ONCE):
            old = [o.header() for o in piece if o.generation < had_before]
            outdated = await self._replaced(old)
            if outdated:
                log.warning("%d objects were stored anew elsewhere meanwhile", len(outdated))
                self._remembering.drop([o for o in old if o.key in outdated])

    def _leaves_nothing(self) -> bool:
        """Whether a next life that was hardly away would find nothing of what is gone here."""
        begun_empty = self._has_begun_empty or not self._may_stay
        is_forgotten = self._remembering.knows_its_disk or not begun_empty
        return is_forgotten and self._remembering.is_saved

    async def _settle(self) -> None:
        """After a start: decides whether what is in the folder may be used."""
        remembering = self._remembering
        while True:
            try:
                self._may_stay = await self._fence(remembering.absent_s)
                break
            except MoonserveError as error:
                log.info("the registry does not say who is there: %s", error)
                await asyncio.sleep(RETRY_S)
        remembering.knows(self._covered_s)
        if self._may_stay:
            remembering.knows_what_it_knew()
        else:
            log.error(
                "nobody knows what was removed in the last %.0f s: beginning empty",
                remembering.absent_s,
            )
        remembering.settled = True
        self._decided.set()

    async def _fence(self, absent_s: float) -> bool:
        """Hears what was removed meanwhile; False = nobody can say all of it. Raises MoonserveError."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + FENCE_S
        while True:
            await self._look_who_is_there()
            answers = await asyncio.gather(*map(self._pulled, self._peers))
            self._covered_s = covered_s(answers)
            verdict = may_stay(absent_s, answers)
            if verdict is not None:
                return verdict
            if loop.time() >= give_up_at:
                return False
            await asyncio.sleep(RETRY_S)

    async def _look_who_is_there(self) -> None:
        members = await self.registry.members()
        self._peers = [m for m in members if m.role == STORE_ROLE and m.instance_id != self._instance_id]

    # Asking others

    async def _gossip(self) -> None:
        try:
            await self._look_who_is_there()
        except MoonserveError:
            log.debug("the registry does not answer; those who were there are asked")
        count = len(self._peers)
        chosen = [self._peers[(self._turn + n) % count] for n in range(min(FANOUT, count))]
        self._turn += FANOUT
        await asyncio.gather(*map(self._pulled, chosen))

    async def _pulled(self, peer: Member) -> Answer | None:
        """All that it knows and this node does not is known then; None = it did not answer."""
        stub = self._stub(peer)
        try:
            while True:
                life, next_seq = self._cursors.get(peer.instance_id, (0, 1))
                request = kvstore_pb2.StoreRemovalsRequest(life=life, next_seq=next_seq)
                reply = await self._channels.call(stub.Removals, request, timeout_s=CALL_S)
                self._cursors[peer.instance_id] = reply.life, reply.next_seq
                await self._remembering.learn(_heard(reply))
                if not reply.more:
                    break
        except (MoonserveError, ValueError) as error:  # whatever one says, the others are heard
            log.debug("%s did not tell its removals: %s", peer.instance_id, error)
            return None
        if reply.settled and self._remembering.settled:
            self._remembering.knows(reply.covered_s)
        return Answer(reply.settled, reply.covered_s)

    async def _replaced(self, found: Sequence[DiskObject]) -> set[BlockKey]:
        """The others' value counts, since it was stored, or seen, while this node was away."""
        answers = await asyncio.gather(*(self._differing(peer, found) for peer in self._peers))
        return set[BlockKey]().union(*answers)

    async def _differing(self, peer: Member, found: Sequence[DiskObject]) -> set[BlockKey]:
        request = kvstore_pb2.StoreFindRequest(keys=[about.key for about in found])
        try:
            reply = await self._channels.call(self._stub(peer).Find, request, timeout_s=CALL_S)
            entries = list(zip(found, entries_from_wire(reply), strict=True))
        except (MoonserveError, ValueError) as error:
            log.debug("%s did not say what it holds: %s", peer.instance_id, error)
            return set()
        return {
            about.key
            for about, entry in entries
            if entry and (entry.length, entry.checksum) != (about.length, about.checksum)
        }

    def _stub(self, peer: Member) -> kvstore_pb2_grpc.KvStoreAsyncStub:
        channel = self._channels.to(peer.endpoint.rpc_address)
        stub: kvstore_pb2_grpc.KvStoreAsyncStub = kvstore_pb2_grpc.KvStoreStub(channel)
        return stub


def _heard(reply: kvstore_pb2.StoreRemovalsReply) -> list[Heard]:
    keys = unpack_keys(reply.keys)
    return [Heard(*each) for each in zip(keys, reply.ids, reply.ages_s, strict=True)]
