"""Rights to read and write at a store node, expressed as the calls and transfers they consist of. Pure.

Each function yields steps for a caller to run: `StoreNode.run` in the caller's thread, `BlockStores` in an event loop.
Nothing of a put is visible before its commit. A right that is not given back expires.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.deadline import ttl_for
from moonserve.kvstore.client.node_access.objects import LeasedObject, ReadLease, ToPut
from moonserve.kvstore.disk.base import Pin
from moonserve.kvstore.state.objects import PutOutcome
from moonserve.kvstore.wire import pin_from_wire, pin_to_wire
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import common_pb2, kvstore_pb2
from moonserve.protocol.request import NO_HINTS, CacheHints, Endpoint
from moonserve.protocol.rpc.wire import to_message
from moonserve.transfer import Op, RemoteSegment, ScatterTransfer

T = TypeVar("T")

GIVE_BACK_TIMEOUT_S = 2.0
"""Seconds spent on giving a right back; afterwards it expires by itself."""


class Call(NamedTuple):
    """A unary call of the store's service. Its step returns the reply."""

    method: Callable[[Any], Callable[..., Any]]
    """Selects the method of a stub."""
    request: Any


Steps = Generator[Call | ScatterTransfer, Any, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOptions:
    """Conditions under which objects are stored."""

    pin: Pin = Pin.NONE
    tenant: str = ""
    hints: CacheHints = NO_HINTS
    """The expected return counts for objects that no other object follows."""
    keeps_present: bool = False
    """True if a key that is stored counts as stored, whatever its value."""


def lease_steps(store: Endpoint, lease_id: str, keys: Sequence[BlockKey], ttl_s: float, now: float) -> Steps[ReadLease]:
    """Leases the longest run of leading keys that the node holds."""
    request = kvstore_pb2.StoreLeaseRequest(lease_id=lease_id, keys=keys, ttl_s=ttl_s)
    reply = yield Call(attrgetter("Lease"), request)
    return ReadLease(
        lease_id=lease_id,
        store=store,
        segment=RemoteSegment(store.transfer_address, reply.segment_id),
        objects=tuple(
            LeasedObject(
                key=key,
                offset=stored.offset,
                length=stored.length,
                checksum=stored.checksum,
                parent=BlockKey(stored.parent) if stored.parent else None,
                tenant=stored.tenant,
                pin=pin_from_wire(stored.pin),
            )
            for key, stored in zip(keys, reply.objects, strict=False)
        ),
        expires_at=now + ttl_s,
    )


def renew_call(lease_id: str, ttl_s: float) -> Call:
    """Returns the call that renews a lease. It raises StaleLease if the lease has ended."""
    return Call(attrgetter("Renew"), kvstore_pb2.StoreRenewRequest(lease_id=lease_id, ttl_s=ttl_s))


def release_call(lease_id: str) -> Call:
    return Call(attrgetter("Release"), kvstore_pb2.StoreReleaseRequest(lease_id=lease_id))


def put_steps(
    address: str,
    reservation_id: str,
    objects: Sequence[ToPut],
    slots: BufferSlots,
    terms: PutOptions,
    left_s: float,
    *,
    wait_s: float = 0.0,
) -> Steps[list[PutOutcome]]:
    """Stores objects that fill their slots and returns their outcomes. If it does not finish, the caller must `abort`.

    `address`: the node's transfer engine. `wait_s`: time to wait for other writers of the same keys.
    """
    hints = to_message(common_pb2.CacheHints, terms.hints)
    request = kvstore_pb2.StoreReserveRequest(
        reservation_id=reservation_id, ttl_s=ttl_for(left_s), wait_s=wait_s, hints=hints
    )
    pin = pin_to_wire(terms.pin)
    for each, length in zip(objects, slots.lengths.tolist(), strict=True):
        request.wishes.add(key=each.key, parent=each.parent or b"", length=length, tenant=terms.tenant, pin=pin)
    reply = yield Call(attrgetter("Reserve"), request)
    puts = [PutOutcome(slot.outcome) for slot in reply.slots]
    granted = [place for place, put in enumerate(puts) if put is PutOutcome.STORED]
    if not granted:
        return puts
    rows = slots.at(granted).rows([reply.slots[place].offset for place in granted])
    remote = RemoteSegment(address, reply.segment_id)
    yield ScatterTransfer(Op.WRITE, slots.segment, remote, rows, reply.window_id)
    commit = kvstore_pb2.StoreCommitRequest(
        reservation_id=reservation_id,
        keys=[objects[place].key for place in granted],
        checksums=[objects[place].checksum for place in granted],
    )
    corrupt = set((yield Call(attrgetter("Commit"), commit)).corrupt)
    for place in granted:
        if objects[place].key in corrupt:
            puts[place] = PutOutcome.CORRUPT
    return puts


def abort_call(reservation_id: str) -> Call:
    return Call(attrgetter("Abort"), kvstore_pb2.StoreAbortRequest(reservation_id=reservation_id))
