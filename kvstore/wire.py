"""Converts between the node's state and its protobuf messages. Refuses malformed messages."""

from collections.abc import Iterable

from moonserve.kvstore.disk.base import Pin
from moonserve.kvstore.index_layout import NO_RECORD, Entry
from moonserve.kvstore.state.objects import Lease, PutRequest, Reservation, StoredObject
from moonserve.kvstore.state.state import StoreState
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import KEY_BYTES, NO_PARENT, BlockKey
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.request import CacheHints
from moonserve.protocol.rpc.wire import from_message

STORE_ROLE = "store"
DIRECTORY_ROLE = "directory"
"""Roles of the members of a cluster's registry."""
_WireSlot = kvstore_pb2.StoreReserveReply.Slot
_PINS = {
    Pin.NONE: kvstore_pb2.STORE_PIN_NONE,
    Pin.SOFT: kvstore_pb2.STORE_PIN_SOFT,
    Pin.HARD: kvstore_pb2.STORE_PIN_HARD,
}
_PINS_BACK = {value: pin for pin, value in _PINS.items()}
NOT_IN_MEMORY = 2**64 - 1
_ABSENT = Entry(NO_RECORD, 0, 0, 0, None)


def keys_from_wire(keys: Iterable[bytes]) -> list[BlockKey]:
    """Returns the keys. Raises InvalidRequest for a key of another length, or all zeros."""
    return [_key(key) for key in keys]


def packed_keys_from_wire(packed: bytes) -> bytes:
    """Returns packed keys unchanged. Raises InvalidRequest unless they are a whole number of keys."""
    if len(packed) % KEY_BYTES:
        raise InvalidRequest(f"{len(packed)} bytes are not a whole number of keys", param="keys")
    return packed


def put_requests_from_wire(message: kvstore_pb2.StoreReserveRequest) -> list[PutRequest]:
    """Returns the puts. Raises InvalidRequest for malformed keys or hints, or an unknown pin."""
    hints = from_message(CacheHints, message.hints)
    return [
        PutRequest(
            key=_key(put.key),
            parent=parent_from_wire(put.parent),
            length=put.length,
            tenant=put.tenant,
            pin=pin_from_wire(put.pin),
            hints=hints,
        )
        for put in message.wishes
    ]


def reservation_to_wire(reservation: Reservation, segment_id: int) -> kvstore_pb2.StoreReserveReply:
    slots = [_WireSlot(outcome=_WireSlot.Outcome.ValueType(s.outcome), offset=s.offset) for s in reservation.slots]
    return kvstore_pb2.StoreReserveReply(slots=slots, segment_id=segment_id, window_id=reservation.window_id or 0)


def checksums_from_wire(message: kvstore_pb2.StoreCommitRequest) -> dict[BlockKey, int]:
    """Returns the checksums by key. Raises InvalidRequest unless there is one checksum per key."""
    if len(message.keys) != len(message.checksums):
        raise InvalidRequest(f"{len(message.keys)} keys with {len(message.checksums)} checksums", param="checksums")
    return dict(zip(keys_from_wire(message.keys), message.checksums, strict=True))


def lease_to_wire(lease: Lease, segment_id: int) -> kvstore_pb2.StoreLeaseReply:
    objects = [
        kvstore_pb2.StoreLeaseReply.Object(
            offset=stored.offset or 0,
            length=stored.length,
            checksum=stored.checksum,
            generation=stored.generation,
            parent=stored.parent or b"",
            tenant=stored.tenant,
            pin=_PINS[stored.pin],
        )
        for stored in lease.objects
    ]
    return kvstore_pb2.StoreLeaseReply(objects=objects, segment_id=segment_id)


def entries_to_wire(entries: Iterable[Entry | None]) -> kvstore_pb2.StoreFindReply:
    reply = kvstore_pb2.StoreFindReply()
    for entry in entries:
        known = entry or _ABSENT
        reply.generations.append(known.generation)
        reply.offsets.append(NOT_IN_MEMORY if known.offset is None else known.offset)
        reply.lengths.append(known.length)
        reply.checksums.append(known.checksum)
    return reply


def entries_from_wire(reply: kvstore_pb2.StoreFindReply) -> list[Entry | None]:
    """Returns the entries, None for absent objects. Raises ValueError unless all columns have the same length."""
    columns = (reply.generations, reply.checksums, reply.lengths, reply.offsets)
    return [
        Entry(NO_RECORD, generation, checksum, length, None if offset == NOT_IN_MEMORY else offset)
        if generation
        else None
        for generation, checksum, length, offset in zip(*columns, strict=True)
    ]


def listing_to_wire(state: StoreState, objects: Iterable[StoredObject]) -> kvstore_pb2.StoreListReply:
    reply = kvstore_pb2.StoreListReply()
    for stored in objects:
        holds, followers = state.holds_and_children(stored)
        reply.objects.add(
            key=stored.key,
            parent=stored.parent or b"",
            length=stored.length,
            checksum=stored.checksum,
            generation=stored.generation,
            in_memory=stored.offset is not None,
            on_disk=stored.place is not None,
            tenant=stored.tenant,
            pin=_PINS[stored.pin],
            holds=holds,
            followers=followers,
        )
    return reply


def pin_to_wire(pin: Pin) -> kvstore_pb2.StorePin.ValueType:
    return _PINS[pin]


def pin_from_wire(pin: kvstore_pb2.StorePin.ValueType) -> Pin:
    """Returns the pin. Raises InvalidRequest for a kind that this version does not know."""
    if pin not in _PINS_BACK:
        raise InvalidRequest(f"unknown kind of pin {pin}", param="pin")
    return _PINS_BACK[pin]


def _key(key: bytes) -> BlockKey:
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"a key has {KEY_BYTES} bytes, not {len(key)}", param="keys")
    if key == NO_PARENT:
        raise InvalidRequest("the key of zeros stands for no key", param="keys")
    return BlockKey(key)


def parent_from_wire(parent: bytes) -> BlockKey | None:
    return None if not parent or parent == NO_PARENT else _key(parent)
