"""Copies objects from another node straight into this node's memory, to make a replica.

The lease at the source is short and renewed while parts move, so that the source of a dead target is free again within
seconds. A copy has its source's pin. Removed objects are not taken from a node that has not heard of the removal.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvstore.client.blocks import BlockStores
from kvstore.client.objects import LeasedObject, ReadLease
from kvstore.client.spots import Spots
from kvstore.promises import Outcome, Reservation
from kvstore.remembering import Remembering
from kvstore.removals import Heard
from kvstore.state import StoreState
from kvstore.stored import Wish
from kvstore.wire import keys_from_wire
from protocol.errors import MoonserveError, StaleLease
from protocol.ids import new_id
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2
from protocol.process import running
from protocol.request import Endpoint
from protocol.wire import endpoint_from_wire
from transfer import Segment
from transfer.config import Patience

log = logging.getLogger(__name__)

PATIENCE = Patience()
LEASE_S = 4.0
"""How long a dead target may hold its source's objects. A suspended target that resumes finds its lease ended."""
RENEW_EVERY_S = 1.0


class Copier:
    """Makes the replicas of one node."""

    def __init__(
        self,
        client: BlockStores,
        state: StoreState,
        remembering: Remembering,
        segment: Segment,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._state = state
        self._remembering = remembering
        self._removals = remembering.removals
        self._segment = segment
        self._clock = clock

    async def copy(self, request: kvstore_pb2.StoreCopyRequest) -> kvstore_pb2.StoreCopyReply:
        """Copies the leading run of keys that the source holds. Raises PeerLost, StaleLease, InvalidRequest."""
        source, keys = endpoint_from_wire(request.source), keys_from_wire(request.keys)
        wanted = keys[: await self._num_up_to_date(source, keys)]
        heard = {key: self._removals.last(key) for key in wanted}
        reply = kvstore_pb2.StoreCopyReply(missing=len(keys))
        if not wanted:
            return reply
        lease = await self._client.lease(source, wanted, ttl_s=LEASE_S)
        reply.missing = len(keys) - len(lease.objects)
        if not lease.objects:
            return reply
        try:
            async with running(self._renewed(lease)):
                reply.copied = await self._copied(lease, heard, request.deadline_s, reply)
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
        reply = await self._client.ask(source, "Removals", request)
        told = zip(keys, reply.ids, reply.ages_s, strict=True)
        theirs = [Heard(*each) if each[1] else None for each in told]
        # Looked up after the call, as in `copy`: the source may not know of a removal during the call.
        ours = [self._removals.last(key) for key in keys]
        await self._remembering.learn(heard for heard in theirs if heard is not None)
        behind = (
            n
            for n, (known, heard) in enumerate(zip(ours, theirs, strict=True))
            if known and (heard is None or heard.removal_id != known)
        )
        return next(behind, len(keys))

    async def _renewed(self, lease: ReadLease) -> None:
        """Renews a lease until the source refuses."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            try:
                await self._client.renew(lease, ttl_s=LEASE_S)
            except StaleLease:
                return
            except MoonserveError as error:
                log.info("the source of a copy did not renew its lease: %s", error)

    async def _copied(
        self,
        lease: ReadLease,
        heard: Mapping[BlockKey, int],
        deadline_s: float,
        reply: kvstore_pb2.StoreCopyReply,
    ) -> int:
        """Copies the leased objects. Returns how many became visible. `heard`: their last removals before the lease."""
        wishes = [_wish(stored) for stored in lease.objects]
        reservation = self._state.writers.reserve(new_id("copy"), wishes, None, self._clock())
        outcomes = [slot.outcome for slot in reservation.slots]
        reply.refused = outcomes.count(Outcome.FULL)
        reply.present = outcomes.count(Outcome.PRESENT) + outcomes.count(Outcome.IN_PROGRESS)
        if not reservation.objects:
            return 0
        granted = tuple(o for o in lease.objects if o.key in reservation.objects)
        good: tuple[LeasedObject, ...] = ()
        try:
            num_good = await self._read(lease, granted, reservation, deadline_s)
            # An object that was removed during the copy is dropped.
            good = tuple(o for o in granted[:num_good] if self._removals.last(o.key) == heard[o.key])
        finally:
            self._end(reservation, {stored.key: stored.checksum for stored in good})
        return len(good)

    async def _read(
        self,
        lease: ReadLease,
        granted: tuple[LeasedObject, ...],
        reservation: Reservation,
        deadline_s: float,
    ) -> int:
        offsets = [reservation.objects[stored.key].offset or 0 for stored in granted]
        spots = Spots.checked(self._segment, offsets, [stored.length for stored in granted])
        # If the lease ends all the same, the bytes may be overwritten; their checksums do not match then.
        return await self._client.read_leased(
            replace(lease, objects=granted, expires_at=math.inf),
            spots,
            deadline_s=deadline_s or PATIENCE.deadline_s(spots.nbytes),
        )

    def _end(self, reservation: Reservation, checksums: dict[BlockKey, int]) -> None:
        """Makes the objects with a checksum visible and drops the rest. They were verified while being read."""
        writers, reservation_id, now = (
            self._state.writers,
            reservation.reservation_id,
            self._clock(),
        )
        if checksums:
            writers.commit(reservation_id, checksums, now)
            writers.verified(reservation_id, (), now)
        else:
            writers.abort(reservation_id, now)
            writers.closed(reservation_id, now)


def _wish(stored: LeasedObject) -> Wish:
    return Wish(
        key=stored.key,
        parent=stored.parent,
        length=stored.length,
        tenant=stored.tenant,
        pin=stored.pin,
        second_hand=True,
    )
