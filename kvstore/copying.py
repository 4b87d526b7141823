"""A replica made here: objects read from another node straight into this node's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvstore.block_client import BlockClient, right_s
from kvstore.objects import LeasedObject, ReadLease
from kvstore.promises import Outcome, Reservation, Wish
from kvstore.state import StoreState
from kvstore.wire import keys_from_wire
from protocol.ids import new_id
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2
from protocol.wire import endpoint_from_wire
from transfer import Segment
from transfer.patience import Patience

PATIENCE = Patience()


async def copy_here(
    client: BlockClient,
    state: StoreState,
    segment: Segment,
    request: kvstore_pb2.StoreCopyRequest,
    clock: Callable[[], float],
) -> kvstore_pb2.StoreCopyReply:
    """The leading run of the keys that the source holds. Raises PeerLost, StaleLease, InvalidRequest."""
    source, keys = endpoint_from_wire(request.source), keys_from_wire(request.keys)
    lease = await client.lease(source, keys, ttl_s=right_s(request.deadline_s or PATIENCE.base_s))
    reply = kvstore_pb2.StoreCopyReply(missing=len(keys) - len(lease.objects))
    if not lease.objects:
        return reply
    try:
        copied = await _Copying(client, state, segment, clock).run(lease, request.deadline_s, reply)
    finally:
        client.release_soon(lease)
    reply.copied = copied
    state.counters["objects_copied"] += copied
    return reply


class _Copying:
    """One run of objects from one source."""

    def __init__(
        self,
        client: BlockClient,
        state: StoreState,
        segment: Segment,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._state = state
        self._segment = segment
        self._clock = clock

    async def run(
        self, lease: ReadLease, deadline_s: float, reply: kvstore_pb2.StoreCopyReply
    ) -> int:
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
            good = granted[:num_good]
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
        nbytes = sum(stored.length for stored in granted)
        places = [
            [(place.offset, place.length)]
            for stored in granted
            if (place := reservation.objects[stored.key]).offset is not None
        ]
        return await self._client.read(
            replace(lease, objects=granted),
            self._segment,
            places,
            deadline_s=deadline_s or PATIENCE.deadline_s(nbytes),
        )

    def _end(self, reservation: Reservation, checksums: dict[BlockKey, int]) -> None:
        """What was verified while it was read becomes visible, the rest is given up."""
        state, reservation_id, now = self._state, reservation.reservation_id, self._clock()
        if checksums:
            state.writers.commit(reservation_id, checksums, now)
            state.writers.verified(reservation_id, (), now)
        else:
            state.writers.abort(reservation_id, now)
            state.writers.closed(reservation_id, now)


def _wish(stored: LeasedObject) -> Wish:
    return Wish(key=stored.key, parent=stored.parent, length=stored.length, tenant=stored.tenant)
