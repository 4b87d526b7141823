"""Copies objects from another node straight into this node's memory, to make a replica.

The lease at the source is short and renewed while parts move, so that the source of a dead target is free again within
seconds. A copy has its source's pin. Removed objects are not taken from a node that has not heard of the removal.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moonserve.kvstore.client.blocks import BlockStores
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.deadline import PATIENCE
from moonserve.kvstore.client.node_access.objects import LeasedObject, ReadLease
from moonserve.kvstore.node.inline_puts import LocalWrites
from moonserve.kvstore.node.removal_store import RemovalStore
from moonserve.kvstore.state.objects import PutOutcome, PutRequest, Reservation
from moonserve.kvstore.state.removals import ReportedRemoval
from moonserve.kvstore.state.state import StoreState
from moonserve.kvstore.wire import keys_from_wire
from moonserve.protocol.errors import MoonserveError, StaleLease
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.request import Endpoint, new_id
from moonserve.protocol.rpc.wire import endpoint_from_wire
from moonserve.transfer import Segment

log = logging.getLogger(__name__)

LEASE_S = 4.0
"""How long a dead target may hold its source's objects. A suspended target that resumes finds its lease ended."""
RENEW_EVERY_S = 1.0


class Copier:
    """Makes the replicas of one node, also when the caller is lost by then."""

    def __init__(
        self,
        client: BlockStores,
        state: StoreState,
        removal_store: RemovalStore,
        segment: Segment,
        writes: LocalWrites,
    ) -> None:
        self._client = client
        self._state = state
        self._removal_store = removal_store
        self._removals = removal_store.removals
        self._segment = segment
        self._writes = writes

    async def copy(self, request: kvstore_pb2.StoreCopyRequest) -> kvstore_pb2.StoreCopyReply:
        """Copies the leading run of keys that the source holds. Raises PeerLost, StaleLease, InvalidRequest."""
        source, keys = endpoint_from_wire(request.source), keys_from_wire(request.keys)
        wanted = keys[: await self._num_up_to_date(source, keys)]
        heard = {key: self._removals.last_id(key) for key in wanted}
        reply = kvstore_pb2.StoreCopyReply(missing=len(keys))
        if not wanted:
            return reply
        lease = await self._client.lease(source, wanted, ttl_s=LEASE_S)
        reply.missing = len(keys) - len(lease.objects)
        if not lease.objects:
            return reply
        try:
            async with background_task(self._keep_renewing(lease)):
                reply.copied = await self._copy_leased(lease, heard, request.deadline_s, reply)
        finally:
            self._client.release_soon(lease)
        self._state.counters["objects_copied"] += reply.copied
        return reply

    async def _num_up_to_date(self, source: Endpoint, keys: Sequence[BlockKey]) -> int:
        """Returns the number of leading keys whose last removal known here is known to the source as well.

        What the source holds of these was stored after that removal. This node learns removals that only the source
        knew, so that they are not taken for later ones. Call it before the lease: then the leased objects cannot be
        older than the answer.
        """
        request = kvstore_pb2.StoreRemovalsRequest(keys=keys)
        reply = await self._client.call(source, "Removals", request)
        told = zip(keys, reply.ids, reply.ages_s, strict=True)
        theirs = [ReportedRemoval(*each) if each[1] else None for each in told]
        # Looked up after the call, as in `copy`: the source may not know of a removal during the call.
        ours = [self._removals.last_id(key) for key in keys]
        await self._removal_store.learn(heard for heard in theirs if heard is not None)
        behind = (
            n
            for n, (known, heard) in enumerate(zip(ours, theirs, strict=True))
            if known and (heard is None or heard.removal_id != known)
        )
        return next(behind, len(keys))

    async def _keep_renewing(self, lease: ReadLease) -> None:
        """Renews a lease until the source refuses."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            try:
                await self._client.renew(lease, ttl_s=LEASE_S)
            except StaleLease:
                return
            except MoonserveError as error:
                log.info("the source of a copy did not renew its lease: %s", error)

    async def _copy_leased(
        self,
        lease: ReadLease,
        heard: Mapping[BlockKey, int],
        deadline_s: float,
        reply: kvstore_pb2.StoreCopyReply,
    ) -> int:
        """Copies the leased objects. Returns how many became visible. `heard`: their last removals before the lease."""
        requests = [
            PutRequest(key=o.key, parent=o.parent, length=o.length, tenant=o.tenant, pin=o.pin, is_copied=True)
            for o in lease.objects
        ]
        reservation = self._state.reservations.reserve(new_id("copy"), requests, None, self._writes.clock())
        self._writes.changed()
        outcomes = [slot.outcome for slot in reservation.slots]
        reply.refused = outcomes.count(PutOutcome.FULL)
        reply.present = outcomes.count(PutOutcome.PRESENT) + outcomes.count(PutOutcome.IN_PROGRESS)
        if not reservation.objects:
            return 0
        granted = tuple(o for o in lease.objects if o.key in reservation.objects)
        good: tuple[LeasedObject, ...] = ()
        try:
            num_good = await self._read(lease, granted, reservation, deadline_s)
            # An object that was removed during the copy is dropped.
            good = tuple(o for o in granted[:num_good] if self._removals.last_id(o.key) == heard[o.key])
        finally:
            if good:  # verified while being read
                self._writes.commit(reservation, {stored.key: stored.checksum for stored in good}, ())
            else:
                self._writes.abort(reservation)
        return len(good)

    async def _read(
        self,
        lease: ReadLease,
        granted: tuple[LeasedObject, ...],
        reservation: Reservation,
        deadline_s: float,
    ) -> int:
        offsets = [reservation.objects[stored.key].offset or 0 for stored in granted]
        slots = BufferSlots.checked(self._segment, offsets, [stored.length for stored in granted])
        # If the lease ends all the same, the bytes may be overwritten; their checksums do not match then.
        return await self._client.read_leased(
            replace(lease, objects=granted, expires_at=math.inf),
            slots,
            deadline_s=deadline_s or PATIENCE.deadline_s(slots.nbytes),
        )
