"""Learns from the other nodes of a cluster which objects were removed or replaced while this node was away.

A running node gossips: it requests new removals from a few nodes at a time, so that a removal reaches all within
seconds, even a node that did not answer when the key was removed. A node that starts, or that the registry had
forgotten, requests them from all nodes *before* its old objects become visible. If no node knows the removals of its
whole absence, it drops all old objects: losing data is better than serving wrong data. Does not know clients. With a
conductor instead of a registry this is not needed, since keys are derived from contents.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from moonserve.kvstore.disk.base import DiskObject
from moonserve.kvstore.node.removal_store import RemovalStore
from moonserve.kvstore.node.verification import batched
from moonserve.kvstore.state.removals import ReportedRemoval
from moonserve.kvstore.state.state import StoreState
from moonserve.kvstore.wire import STORE_ROLE, entries_from_wire
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.kv_blocks import BlockKey, unpack_keys
from moonserve.protocol.membership.registry import TTL_S, Member, Registry
from moonserve.protocol.membership.registry.lease import RegistryLease
from moonserve.protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.rpc.grpc_transport import Channels

PeerAnswer = kvstore_pb2.StoreRemovalsReply
"""A peer's last answer, after it has sent all its removals. `settled` False: it was away itself, and is still catching
up. `covered_s`: it knows every removal of this last time."""


def covered_s(answers: Sequence[PeerAnswer | None]) -> float:
    """Returns for how far back all removals are known after these answers."""
    return max((a.covered_s for a in answers if a is not None and a.settled), default=0.0)


def old_objects_may_stay(absent_s: float, answers: Sequence[PeerAnswer | None]) -> bool | None:
    """Decides if old objects may stay, given one answer per other node (None = no answer). Returns None to ask again.

    They may stay if a settled node covers the whole absence, or if there is no other node, or all others were away too.
    They may not if all nodes answered and the settled ones cover less: losing data is better than serving wrong data.
    """
    settled = any(answer is not None and answer.settled for answer in answers)
    if settled and covered_s(answers) >= absent_s:
        return True
    return None if None in answers else not settled


log = logging.getLogger(__name__)

PULL_EVERY_S = 1.0
FANOUT = 4
"""Nodes per round of gossip: a removal reaches all n nodes in about log(n) rounds."""
CALL_S = 2.0
RETRY_S = 0.3
FENCE_S = 2 * TTL_S
"""Twice as long as the registry may still list a node that died."""
PRESENCE_EVERY_S = 5.0
COMPARED_AT_ONCE = 4_096
COMPARE_S = 3.0
"""How long a rejoin waits for the comparison with other nodes; the rest is compared in the background."""


class CatchUp:
    """Decides for recovery and rejoining which old objects may stay, and gossips. Belongs to one event loop."""

    def __init__(
        self,
        instance_id: str,
        registry: Registry,
        removal_store: RemovalStore,
        state: StoreState,
        channels: Channels,
    ) -> None:
        self._instance_id = instance_id
        self.registry = registry
        self._removal_store = removal_store
        self._state = state
        self._channels = channels
        removal_store.settled = False
        self._cursors: dict[str, tuple[int, int]] = {}
        """(life, next sequence number) of the removals known here, by peer."""
        self._peers: list[Member] = []
        self._turn = 0
        self._decided = asyncio.Event()
        self._may_stay = False
        self._has_begun_empty = False  # since the start: objects still found on disk are dropped, too
        self._covered_s = 0.0  # the best of the last answers
        self._comparing: asyncio.Task[None] | None = None

    async def run(self, lease: RegistryLease) -> None:
        """Settles, then gossips and notes this node's presence until cancelled. Runs next to the lease."""
        try:
            await lease.joined.wait()
            await self._settle()
            noted_at = float("-inf")
            while True:
                loop = asyncio.get_running_loop()
                is_due = loop.time() - noted_at >= PRESENCE_EVERY_S
                if is_due and lease.silence_s < TTL_S and self._is_safe_to_restart():
                    noted_at = loop.time()
                    await self._removal_store.save_contact()
                await asyncio.sleep(PULL_EVERY_S)
                await self._gossip()
        finally:
            if self._comparing is not None:
                self._comparing.cancel()

    async def close(self) -> None:
        """Closes channels and registry. Call it once nothing else runs."""
        await self._channels.close()
        await self.registry.close()

    # Old objects

    async def wait_until_decided(self) -> bool:
        """Waits until it is decided if the disk's objects may be used. Returns False if none may."""
        await self._decided.wait()
        return self._may_stay

    async def outdated_keys(self, found: Sequence[DiskObject]) -> set[BlockKey]:
        """Returns the keys whose value on another node differs; all keys if the node has begun empty."""
        replaced = await self._replaced_keys(found)
        return {about.key for about in found} if self._has_begun_empty else replaced

    async def before_rejoin(self, absent_s: float) -> None:
        """Catches up after the registry had forgotten this node. Raises MoonserveError if the registry is silent."""
        had_before = self._state.catalog.latest_generation + 1
        if not await self._learn_absence(absent_s):
            log.error("no node knows all removals of the last %.0f s: starting empty", absent_s)
            self._has_begun_empty = True
            self._removal_store.drop([o.header() for o in self._state.catalog.objects()])
            self._removal_store.limit_coverage(self._covered_s)
            return
        if self._comparing is not None:
            self._comparing.cancel()  # objects that it has compared may have been replaced since
        self._comparing = asyncio.create_task(self._compare(had_before))
        await asyncio.wait({self._comparing}, timeout=COMPARE_S)

    async def _compare(self, had_before: int) -> None:
        """Compares all objects older than `had_before` with other nodes' and drops outdated ones. May take long."""
        for piece in batched(self._state.catalog.objects(), COMPARED_AT_ONCE):
            old = [o.header() for o in piece if o.generation < had_before]
            outdated = await self._replaced_keys(old)
            if outdated:
                log.warning("%d objects were replaced on other nodes meanwhile", len(outdated))
                self._removal_store.drop([o for o in old if o.key in outdated])

    def _is_safe_to_restart(self) -> bool:
        """Returns True if a restart now would find no object that is gone here."""
        begun_empty = self._has_begun_empty or not self._may_stay
        is_forgotten = self._removal_store.disk_is_recovered or not begun_empty
        return is_forgotten and self._removal_store.is_saved

    async def _settle(self) -> None:
        """Decides after a start if the objects in the folder may be used."""
        removal_store = self._removal_store
        while True:
            try:
                self._may_stay = await self._learn_absence(removal_store.absent_s)
                break
            except MoonserveError as error:
                log.info("the registry does not list its members: %s", error)
                await asyncio.sleep(RETRY_S)
        removal_store.extend_coverage(self._covered_s)
        if self._may_stay:
            removal_store.restore_coverage()
        else:
            log.error(
                "no node knows all removals of the last %.0f s: starting empty",
                removal_store.absent_s,
            )
        removal_store.settled = True
        self._decided.set()

    async def _learn_absence(self, absent_s: float) -> bool:
        """Learns all removals of the absence; False = no node knows all. Raises MoonserveError (silent registry)."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + FENCE_S
        while True:
            await self._refresh_peers()
            answers = await asyncio.gather(*map(self._pull_removals, self._peers))
            self._covered_s = covered_s(answers)
            verdict = old_objects_may_stay(absent_s, answers)
            if verdict is not None:
                return verdict
            if loop.time() >= give_up_at:
                return False
            await asyncio.sleep(RETRY_S)

    async def _refresh_peers(self) -> None:
        members = await self.registry.members()
        self._peers = [m for m in members if m.role == STORE_ROLE and m.instance_id != self._instance_id]

    # Calls to other nodes

    async def _gossip(self) -> None:
        try:
            await self._refresh_peers()
        except MoonserveError:
            log.debug("the registry does not answer; asking the last known nodes")
        count = len(self._peers)
        chosen = [self._peers[(self._turn + n) % count] for n in range(min(FANOUT, count))]
        self._turn += FANOUT
        await asyncio.gather(*map(self._pull_removals, chosen))

    async def _pull_removals(self, peer: Member) -> PeerAnswer | None:
        """Learns all removals that a peer knows. Returns None if it did not answer."""
        stub = self._stub(peer)
        try:
            while True:
                life, next_seq = self._cursors.get(peer.instance_id, (0, 1))
                request = kvstore_pb2.StoreRemovalsRequest(life=life, next_seq=next_seq)
                reply = await self._channels.call(stub.Removals, request, timeout_s=CALL_S)
                self._cursors[peer.instance_id] = reply.life, reply.next_seq
                heard = zip(unpack_keys(reply.keys), reply.ids, reply.ages_s, strict=True)
                await self._removal_store.learn([ReportedRemoval(*each) for each in heard])
                if not reply.more:
                    break
        except (MoonserveError, ValueError) as error:  # a bad answer must not stop the round
            log.debug("%s did not send its removals: %s", peer.instance_id, error)
            return None
        if reply.settled and self._removal_store.settled:
            self._removal_store.extend_coverage(reply.covered_s)
        return reply

    async def _replaced_keys(self, found: Sequence[DiskObject]) -> set[BlockKey]:
        """Returns the keys of which a peer holds another value. The peer's counts: it was stored or seen meanwhile."""
        answers = await asyncio.gather(*(self._differing(peer, found) for peer in self._peers))
        return set[BlockKey]().union(*answers)

    async def _differing(self, peer: Member, found: Sequence[DiskObject]) -> set[BlockKey]:
        request = kvstore_pb2.StoreFindRequest(keys=[about.key for about in found])
        try:
            reply = await self._channels.call(self._stub(peer).Find, request, timeout_s=CALL_S)
            entries = list(zip(found, entries_from_wire(reply), strict=True))
        except (MoonserveError, ValueError) as error:
            log.debug("%s did not report its objects: %s", peer.instance_id, error)
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
