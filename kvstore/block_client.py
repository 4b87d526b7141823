"""Workers' access to stored blocks: leases, one-sided reads and writes, verification.

Rules: every operation is bounded by its deadline; bytes that do not match their checksum never count as read; an
operation that fails or is cancelled leaves no lease and no reservation behind, and ends only when no transfer touches
the caller's memory any more. It does not know what the bytes mean.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc.aio

from kvstore.objects import (
    Pieces,
    PutObject,
    PutResult,
    ReadLease,
    leased_objects,
    reads,
    writes,
)
from kvstore.promises import MAX_TTL_S, Outcome
from kvstore.removals import Heard
from kvstore.wire import slots_from_wire
from protocol.checksum import checksum
from protocol.errors import DeadlineExceeded, MoonserveError, StaleLease
from protocol.ids import new_id
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from protocol.request import Endpoint
from protocol.rpc import Channels
from protocol.wire import endpoint_from_wire
from transfer import Batch, RemoteSegment, ScatterTransfer, Segment, TransferEngine
from transfer.patience import Patience

log = logging.getLogger(__name__)

# Giving something back is worth waiting this long for; afterwards its time limit at the node does it.
UNDO_TIMEOUT_S = 2.0
# A right lasts a little longer than the deadline of its user, so that the node never ends it first.
TTL_MARGIN_S = 5.0
# XXH3 verifies this much in a few tenths of a millisecond; more goes to a thread.
VERIFY_INLINE_BYTES = 2 * 2**20
PATIENCE = Patience()


class BlockClient:
    """Reads from and writes to any store node. Belongs to one event loop; `close` it before the transfer engine."""

    def __init__(self, channels: Channels, transfer: TransferEngine) -> None:
        self._channels = channels
        self._transfer = transfer
        self._stubs: dict[str, tuple[grpc.aio.Channel, kvstore_pb2_grpc.KvStoreAsyncStub]] = {}
        self._undoing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Waits for what is being given back."""
        await asyncio.gather(*self._undoing)

    async def locate(self, rpc_address: str, *, timeout_s: float = 2.0) -> Endpoint:
        """The endpoint of the node that listens at `host:port`, for use without a conductor."""
        request = kvstore_pb2.StoreStatsRequest()
        stub = self._stub(rpc_address)
        reply = await self._channels.call(stub.Stats, request, timeout_s=timeout_s)
        return dataclasses.replace(endpoint_from_wire(reply.endpoint), rpc_address=rpc_address)

    async def lease(
        self,
        store: Endpoint,
        keys: Sequence[BlockKey],
        *,
        ttl_s: float = 10.0,
        timeout_s: float = 2.0,
    ) -> ReadLease:
        """Leases the longest run of leading keys that the node holds; with none of them there is nothing to release."""
        lease_id = new_id("lease")
        asked_at = now()
        request = kvstore_pb2.StoreLeaseRequest(lease_id=lease_id, keys=keys, ttl_s=ttl_s)
        try:
            stub = self._stub(store.rpc_address)
            reply = await self._channels.call(stub.Lease, request, timeout_s=timeout_s)
        except BaseException:  # cancellation too: the node may have granted what nobody will use
            self._undo(self._release(store, lease_id))
            raise
        return ReadLease(
            lease_id=lease_id,
            store=store,
            segment=RemoteSegment(store.transfer_address, reply.segment_id),
            objects=tuple(leased_objects(keys, reply)),
            expires_at=asked_at + ttl_s,
        )

    async def read(
        self,
        lease: ReadLease,
        local: Segment,
        places: Sequence[Pieces],
        *,
        deadline_s: float,
    ) -> int:
        """Reads object i into the pieces `places[i]`, in order; `places` may stop before the lease's objects do.

        Gives the number of leading objects that match their checksum; those that do not are removed at the node. When
        it returns or raises, no transfer writes to `local` any more. Raises PeerLost, StaleLease (it expired before
        all was read; nothing can be trusted), InvalidRequest.
        """
        await self.transfer(lease, reads(lease, local, places), deadline_s=deadline_s)
        return await self.verify(lease, local, places)

    async def transfer(
        self, lease: ReadLease, transfer: ScatterTransfer, *, deadline_s: float
    ) -> None:
        """Part of a `read`, for who wants leased objects' bytes in an order of its own: nothing counts before `verify`
        says so. When it returns or raises, no byte of it moves any more. Raises as `read`."""
        left_s = lease.expires_at - now()
        if left_s <= 0:
            raise StaleLease("the read lease has expired", lease_id=lease.lease_id)
        await _settled(self._transfer.submit([transfer], deadline_s=min(deadline_s, left_s)))

    async def verify(self, lease: ReadLease, local: Segment, places: Sequence[Pieces]) -> int:
        """The other part: how many leading objects, of which all bytes have been read, match their checksum. Those
        that do not are removed at the node. Raises StaleLease."""
        objects = lease.objects[: len(places)]
        bad = await _mismatches(local, places, [stored.checksum for stored in objects])
        if not bad:
            return len(objects)
        await self._report_corrupt(lease, [objects[index].key for index in bad])
        return bad[0]

    async def renew(self, lease: ReadLease, *, ttl_s: float = 10.0) -> ReadLease:
        """The lease with a new expiry. Raises StaleLease when it has ended."""
        asked_at = now()
        request = kvstore_pb2.StoreRenewRequest(lease_id=lease.lease_id, ttl_s=ttl_s)
        stub = self._stub(lease.store.rpc_address)
        await self._channels.call(stub.Renew, request, timeout_s=UNDO_TIMEOUT_S)
        return dataclasses.replace(lease, expires_at=asked_at + ttl_s)

    async def release(self, lease: ReadLease) -> None:
        """Gives a lease back, also when the caller is cancelled; no-op when it has ended or the node is gone."""
        if lease.objects:
            await asyncio.shield(self.release_soon(lease))

    def release_soon(self, lease: ReadLease) -> asyncio.Task[None]:
        """Gives a lease back without waiting for the node's answer."""
        return self._undo(self._release(lease.store, lease.lease_id))

    async def put(
        self,
        store: Endpoint,
        objects: Sequence[PutObject],
        local: Segment,
        *,
        deadline_s: float | None = None,
    ) -> PutResult:
        """Stores objects from local memory; what counts as stored is visible when this returns.

        Without a deadline it takes as long as its bytes may (`transfer.patience`).

        When it returns or raises, no transfer reads from `local` any more. Raises PeerLost, InvalidRequest (an object
        that could never fit), StaleLease, DeadlineExceeded.
        """
        if deadline_s is None:
            deadline_s = PATIENCE.deadline_s(sum(wish.length for wish in objects))
        outcomes, corrupt = await self._put(store, objects, local, now() + deadline_s)
        return PutResult(
            stored=outcomes.count(Outcome.GRANTED) - len(corrupt),
            present=outcomes.count(Outcome.PRESENT) + outcomes.count(Outcome.IN_PROGRESS),
            refused=outcomes.count(Outcome.FULL),
            corrupt=corrupt,
        )

    async def exists(
        self, store: Endpoint, keys: Sequence[BlockKey], *, timeout_s: float = 2.0
    ) -> list[bool]:
        """Whether each of the keys can be read now."""
        request = kvstore_pb2.StoreExistsRequest(keys=keys)
        stub = self._stub(store.rpc_address)
        reply = await self._channels.call(stub.Exists, request, timeout_s=timeout_s)
        return list(reply.present)

    async def prefetch(
        self, store: Endpoint, keys: Sequence[BlockKey], *, timeout_s: float = 2.0
    ) -> int:
        """Has the node bring the leading run of these keys from disk to memory; gives how many are on their way."""
        request = kvstore_pb2.StorePrefetchRequest(keys=keys)
        stub = self._stub(store.rpc_address)
        reply = await self._channels.call(stub.Prefetch, request, timeout_s=timeout_s)
        return reply.num_loading

    async def remove(
        self,
        store: Endpoint,
        keys: Sequence[BlockKey],
        *,
        corrupt: bool = False,
        timeout_s: float = 2.0,
    ) -> int:
        """Removes objects, under a reader too, who may finish; gives how many were there."""
        request = kvstore_pb2.StoreRemoveRequest(keys=keys, corrupt=corrupt)
        stub = self._stub(store.rpc_address)
        reply = await self._channels.call(stub.Remove, request, timeout_s=timeout_s)
        return reply.removed

    async def last_removals(
        self, store: Endpoint, keys: Sequence[BlockKey], *, timeout_s: float = 2.0
    ) -> list[Heard | None]:
        """The last removal of each key that the node knows of; None = of none."""
        request = kvstore_pb2.StoreRemovalsRequest(keys=keys)
        stub = self._stub(store.rpc_address)
        reply = await self._channels.call(stub.Removals, request, timeout_s=timeout_s)
        told = zip(keys, reply.ids, reply.ages_s, strict=True)
        return [Heard(*each) if each[1] else None for each in told]

    async def stats(
        self, store: Endpoint, *, timeout_s: float = 2.0
    ) -> kvstore_pb2.StoreStatsReply:
        """What the node holds, and what it has counted since its start."""
        request = kvstore_pb2.StoreStatsRequest()
        stub = self._stub(store.rpc_address)
        return await self._channels.call(stub.Stats, request, timeout_s=timeout_s)

    async def _put(
        self,
        store: Endpoint,
        objects: Sequence[PutObject],
        local: Segment,
        give_up_at: float,
        *,
        wait_share: float = 0.0,
    ) -> tuple[list[Outcome], tuple[BlockKey, ...]]:
        """The outcome of each object, and the keys that arrived corrupt.

        `wait_share`: of the time left, what may pass until other writers of the same keys have finished.
        """
        request = kvstore_pb2.StoreReserveRequest(
            reservation_id=new_id("put"),
            ttl_s=right_s(left(give_up_at)),
            wait_s=left(give_up_at) * wait_share,
        )
        for wish in objects:
            request.wishes.add(key=wish.key, parent=wish.parent or b"", length=wish.length)
        try:
            return await self._reserve_write_commit(store, request, objects, local, give_up_at)
        except BaseException:  # cancellation too: others wait for the space and for the keys
            self._undo(self._abort(store, request.reservation_id))
            raise

    async def _reserve_write_commit(
        self,
        store: Endpoint,
        request: kvstore_pb2.StoreReserveRequest,
        objects: Sequence[PutObject],
        local: Segment,
        give_up_at: float,
    ) -> tuple[list[Outcome], tuple[BlockKey, ...]]:
        stub = self._stub(store.rpc_address)
        reply = await self._channels.call(stub.Reserve, request, timeout_s=left(give_up_at))
        slots = slots_from_wire(reply)
        outcomes = [slot.outcome for slot in slots]
        granted = [
            wish
            for wish, outcome in zip(objects, outcomes, strict=True)
            if outcome is Outcome.GRANTED
        ]
        if not granted:
            return outcomes, ()
        remote = RemoteSegment(store.transfer_address, reply.segment_id)
        transfer = writes(objects, slots, local, remote, reply.window_id)
        await _settled(self._transfer.submit([transfer], deadline_s=left(give_up_at)))
        return outcomes, await self._commit(store, request.reservation_id, granted, give_up_at)

    async def _commit(
        self,
        store: Endpoint,
        reservation_id: str,
        granted: Sequence[PutObject],
        give_up_at: float,
    ) -> tuple[BlockKey, ...]:
        request = kvstore_pb2.StoreCommitRequest(
            reservation_id=reservation_id,
            keys=[wish.key for wish in granted],
            checksums=[wish.checksum for wish in granted],
        )
        stub = self._stub(store.rpc_address)
        reply = await self._channels.call(stub.Commit, request, timeout_s=left(give_up_at))
        return tuple(BlockKey(key) for key in reply.corrupt)

    async def _report_corrupt(self, lease: ReadLease, keys: Sequence[BlockKey]) -> None:
        """Has rotten objects removed. Raises StaleLease when they were not rotten but no longer the leased ones."""
        log.error("%d objects from %s are corrupt", len(keys), lease.store.instance_id)
        try:
            await self.renew(lease)
            await self.remove(lease.store, keys, corrupt=True)
        except StaleLease:
            raise
        except MoonserveError as error:  # the caller knows not to use them, which matters more
            log.warning("corrupt objects could not be removed: %s", error)

    async def _release(self, store: Endpoint, lease_id: str) -> None:
        request = kvstore_pb2.StoreReleaseRequest(lease_id=lease_id)
        stub = self._stub(store.rpc_address)
        await self._channels.call(stub.Release, request, timeout_s=UNDO_TIMEOUT_S)

    async def _abort(self, store: Endpoint, reservation_id: str) -> None:
        request = kvstore_pb2.StoreAbortRequest(reservation_id=reservation_id)
        stub = self._stub(store.rpc_address)
        await self._channels.call(stub.Abort, request, timeout_s=UNDO_TIMEOUT_S)

    def _undo(self, body: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Gives something back in a task of its own, which the end of the caller does not end."""
        task = asyncio.create_task(_best_effort(body))
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)
        return task

    def _stub(self, rpc_address: str) -> kvstore_pb2_grpc.KvStoreAsyncStub:
        channel = self._channels.to(rpc_address)
        known = self._stubs.get(rpc_address)
        if known is None or known[0] is not channel:  # the channel was closed and made again
            stub: kvstore_pb2_grpc.KvStoreAsyncStub = kvstore_pb2_grpc.KvStoreStub(channel)
            known = self._stubs[rpc_address] = (channel, stub)
        return known[1]


def now() -> float:
    return asyncio.get_running_loop().time()


def left(give_up_at: float) -> float:
    """Seconds until then. Raises DeadlineExceeded when there are none."""
    left_s = give_up_at - now()
    if left_s <= 0:
        raise DeadlineExceeded("the deadline passed before the operation was complete")
    return left_s


def right_s(needed_s: float) -> float:
    """How long a right must last that is needed for `needed_s`."""
    return min(needed_s + TTL_MARGIN_S, MAX_TTL_S)


async def _best_effort(body: Coroutine[Any, Any, None]) -> None:
    """What is not given back in time, the node takes back by itself."""
    try:
        await body
    except MoonserveError as error:
        log.info("not given back: %s", error)


async def _settled(batch: Batch) -> None:
    """Waits until no byte of the batch moves any more (its deadline bounds it), also when cancelled; then raises."""
    cancelled: asyncio.CancelledError | None = None
    while not batch.done:
        try:
            await batch
        except asyncio.CancelledError as error:
            cancelled = error
        except MoonserveError:
            break
    if cancelled is not None:
        raise cancelled
    await batch


async def _mismatches(
    local: Segment, places: Sequence[Pieces], checksums: Sequence[int]
) -> list[int]:
    """The indexes of the objects whose pieces do not match."""

    def compare() -> list[int]:
        memory = local.buffer
        return [
            index
            for index, (pieces, expected) in enumerate(zip(places, checksums, strict=True))
            if checksum(memory[offset : offset + length] for offset, length in pieces) != expected
        ]

    if sum(length for pieces in places for _, length in pieces) <= VERIFY_INLINE_BYTES:
        return compare()
    return await asyncio.to_thread(compare)
