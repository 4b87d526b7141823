"""Reads with the node's help: under a lease that keeps the object where it is, and brings it to memory first.

The slow way, for what is only on disk or keeps moving. Its rule: bytes that were read when the lease may have ended do
not count.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from kvstore.client.deadline import Deadline
from kvstore.client.far import matches, read
from kvstore.client.fate import Fate, too_small
from kvstore.client.near import require_within
from kvstore.client.node import StoreNode
from kvstore.client.spots import Spots
from kvstore.native.base import Entry
from protocol.errors import MoonserveError, StaleLease
from protocol.ids import new_id
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2
from transfer import RemoteSegment, Segment, TransferEngine

log = logging.getLogger(__name__)

_RELEASE_S = 2.0
"""Afterwards the lease's own end does it."""


@dataclass(slots=True, eq=False, kw_only=True)
class NodeLease:
    """The right to read the first keys of a list at one node."""

    node: StoreNode
    lease_id: str
    entries: list[Entry]
    data: RemoteSegment
    expires_at: float
    """Monotonic; not later than the node thinks."""

    def require_valid(self) -> None:
        """What was read until now counts. Raises StaleLease."""
        if time.monotonic() >= self.expires_at:
            raise StaleLease("the read lease has expired", lease_id=self.lease_id)

    def renew(self, ttl_s: float, deadline: Deadline) -> None:
        """Raises StaleLease when it has ended."""
        asked_at = time.monotonic()
        request = kvstore_pb2.StoreRenewRequest(lease_id=self.lease_id, ttl_s=ttl_s)
        self.node.call(lambda stub: stub.Renew, request, deadline)
        self.expires_at = asked_at + ttl_s

    async def renew_backstage(self, ttl_s: float) -> None:
        """As `renew`."""
        asked_at = time.monotonic()
        request = kvstore_pb2.StoreRenewRequest(lease_id=self.lease_id, ttl_s=ttl_s)
        await self.node.ask(lambda stub: stub.Renew, request, _RELEASE_S)
        self.expires_at = asked_at + ttl_s

    def close(self) -> None:
        """Waits for the node, so that what is removed or put next finds the space. No error when it is gone."""
        if not self.entries:
            return
        request = kvstore_pb2.StoreReleaseRequest(lease_id=self.lease_id)
        try:
            self.node.call(lambda stub: stub.Release, request, Deadline(_RELEASE_S))
        except MoonserveError as error:
            log.info("lease %s not given back: %s", self.lease_id, error)


def take_lease(
    node: StoreNode, keys: Sequence[BlockKey], deadline: Deadline, ttl_s: float | None = None
) -> NodeLease:
    """On the longest run of leading keys that the node holds. Raises PeerLost, DeadlineExceeded.

    Without `ttl_s` it lasts as long as reading what it covers may take.
    """
    first_s = deadline.ttl_s() if ttl_s is None else ttl_s
    data = node.attached(deadline).data
    lease_id = new_id("lease")
    asked_at = time.monotonic()
    request = kvstore_pb2.StoreLeaseRequest(lease_id=lease_id, keys=keys, ttl_s=first_s)
    reply = node.call(lambda stub: stub.Lease, request, deadline)
    entries = [Entry(0, o.generation, o.checksum, o.length, o.offset) for o in reply.objects]
    lease = NodeLease(
        node=node,
        lease_id=lease_id,
        entries=entries,
        data=RemoteSegment(data.address, reply.segment_id),
        expires_at=asked_at + first_s,
    )
    deadline.allow(sum(entry.length for entry in entries))
    if entries and ttl_s is None and lease.expires_at < time.monotonic() + deadline.left_s():
        lease.renew(deadline.ttl_s(), deadline)
    return lease


def each_run(
    node: StoreNode, keys: Sequence[BlockKey], deadline: Deadline
) -> Iterator[tuple[int, NodeLease]]:
    """Leases on all of the keys that are there: each with the place of its first key, until the next.

    A lease stops at the first key that is absent; the next one begins behind it.
    """
    first = 0
    while first < len(keys):
        with closing(take_lease(node, keys[first:], deadline)) as lease:
            yield first, lease
        first += len(lease.entries) + 1


def read_into(
    engine: TransferEngine,
    lease: NodeLease,
    part: slice,
    spots: Spots,
    *,
    verify: bool,
    deadline: Deadline,
) -> list[int | Fate]:
    """Reads each leased object of a part into its spot. Raises StaleLease, InvalidRequest for one that does not fit."""
    runs, entries = [], lease.entries[part]
    for place, entry in enumerate(entries):
        if entry.length > spots.rooms[place]:
            raise too_small(entry.length, int(spots.rooms[place]))
        runs.append((entry.offset or 0, int(spots.offsets[place]), entry.length))
    read(engine, lease.data, spots.segment, runs, deadline)
    lease.require_valid()
    return [
        entry.length if not verify or matches(entry, spots, place) else Fate.CORRUPT
        for place, entry in enumerate(entries)
    ]


def read_part(
    engine: TransferEngine,
    lease: NodeLease,
    local: Segment,
    offset: int,
    length: int,
    deadline: Deadline,
) -> None:
    """Bytes from the midst of the first object, to the beginning of `local`. Raises StaleLease, InvalidRequest."""
    [entry] = lease.entries
    require_within(entry, offset, length)
    read(engine, lease.data, local, [((entry.offset or 0) + offset, 0, length)], deadline)
    lease.require_valid()
