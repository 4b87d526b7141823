"""What clients hold and wish for, and the transfers that these turn into. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.disk.base import Pin
from kvstore.promises import Outcome, Slot
from kvstore.wire import pin_from_wire
from protocol.errors import InvalidRequest
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2
from protocol.request import Endpoint
from transfer import Op, RemoteSegment, ScatterTransfer, Segment, scatter

Pieces = Sequence[tuple[int, int]]
"""(local_offset, length) of the parts of one object, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedObject:
    """One object as it lies in the node's segment."""

    key: BlockKey
    offset: int
    length: int
    checksum: int
    generation: int
    parent: BlockKey | None = None
    tenant: str = ""
    pin: Pin = Pin.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLease:
    """The right to read the leading objects of a list of keys until it expires or is released."""

    lease_id: str
    store: Endpoint
    segment: RemoteSegment
    objects: tuple[LeasedObject, ...]  # of the leading keys that are present
    expires_at: float  # event loop's clock; not later than the node thinks


@dataclass(frozen=True, slots=True, kw_only=True)
class PutObject:
    """An object to store: where its pieces lie in local memory, and its checksum as made by its writer."""

    key: BlockKey
    parent: BlockKey | None  # None = its chain starts here
    checksum: int
    pieces: Sequence[tuple[int, int]]

    @property
    def length(self) -> int:
        return sum(length for _, length in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResult:
    """What became of each object of a put."""

    stored: int
    present: int  # it was there already, or another writer is storing it
    refused: int  # no space that could be had
    corrupt: tuple[BlockKey, ...]  # arrived with another checksum and were dropped


def leased_objects(
    keys: Sequence[BlockKey], reply: kvstore_pb2.StoreLeaseReply
) -> Iterator[LeasedObject]:
    for key, stored in zip(keys, reply.objects, strict=False):
        yield LeasedObject(
            key=key,
            offset=stored.offset,
            length=stored.length,
            checksum=stored.checksum,
            generation=stored.generation,
            parent=BlockKey(stored.parent) if stored.parent else None,
            tenant=stored.tenant,
            pin=pin_from_wire(stored.pin),
        )


def reads(lease: ReadLease, local: Segment, places: Sequence[Pieces]) -> ScatterTransfer:
    """Raises InvalidRequest when places do not fit the leased objects."""
    if len(places) > len(lease.objects):
        raise InvalidRequest(f"{len(places)} places for {len(lease.objects)} leased objects")
    runs: list[tuple[int, int, int]] = []
    for stored, pieces in zip(lease.objects, places, strict=False):
        if sum(length for _, length in pieces) != stored.length:
            raise InvalidRequest(f"places do not add up to an object of {stored.length} bytes")
        runs += _runs(pieces, stored.offset)
    return ScatterTransfer(Op.READ, local, lease.segment, scatter.rows(*runs))


def writes(
    objects: Sequence[PutObject],
    slots: Sequence[Slot],
    local: Segment,
    remote: RemoteSegment,
    window_id: int,
) -> ScatterTransfer:
    """Each granted object into its slot."""
    runs: list[tuple[int, int, int]] = []
    for wish, slot in zip(objects, slots, strict=True):
        if slot.outcome is Outcome.GRANTED:
            runs += _runs(wish.pieces, slot.offset)
    return ScatterTransfer(Op.WRITE, local, remote, scatter.rows(*runs), window_id)


def _runs(pieces: Pieces, remote_offset: int) -> Iterator[tuple[int, int, int]]:
    """One object's pieces, back to back on the remote side."""
    for local_offset, length in pieces:
        yield remote_offset, local_offset, length
        remote_offset += length
