"""Reads with the node's help, under a lease that loads the objects into memory and keeps them in place.

This is the slow way, for objects that are only on disk or keep moving. Bytes do not count if the lease may have ended
while they were read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from kvstore.client.deadline import Deadline
from kvstore.client.far import matches, read
from kvstore.client.node import StoreNode
from kvstore.client.objects import Fate, LeasedObject, ReadLease, too_small
from kvstore.client.rights import UNDO_TIMEOUT_S, leased, release, renew
from kvstore.client.spots import Spots
from protocol.errors import MoonserveError, StaleLease
from protocol.ids import new_id
from protocol.keys import BlockKey
from transfer import TransferEngine

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class NodeLease:
    """A lease at one node, with the means to renew and release it."""

    node: StoreNode
    held: ReadLease

    @property
    def entries(self) -> Sequence[LeasedObject]:
        return self.held.objects

    def require_valid(self) -> None:
        """Raises StaleLease if the lease may have ended; otherwise everything read so far counts."""
        if time.monotonic() >= self.held.expires_at:
            raise StaleLease("the read lease has expired", lease_id=self.held.lease_id)

    def renew(self, ttl_s: float, deadline: Deadline) -> None:
        """Renews the lease. Raises StaleLease if it has ended."""
        expires_at = time.monotonic() + ttl_s
        self.node.call(*renew(self.held.lease_id, ttl_s), deadline)
        self.held = replace(self.held, expires_at=expires_at)

    async def renew_backstage(self, ttl_s: float) -> None:
        """Renews the lease from the backstage loop. A lease that has ended becomes invalid."""
        expires_at = time.monotonic() + ttl_s
        try:
            await self.node.ask(*renew(self.held.lease_id, ttl_s), UNDO_TIMEOUT_S)
        except StaleLease:
            expires_at = 0.0
        self.held = replace(self.held, expires_at=expires_at)

    def close(self) -> None:
        """Releases the lease and waits for the node, so that its space can be reused. No error if the node is gone."""
        if not self.entries:
            return
        try:
            self.node.call(*release(self.held.lease_id), Deadline(UNDO_TIMEOUT_S))
        except MoonserveError as error:
            log.info("lease %s not given back: %s", self.held.lease_id, error)


def take_lease(node: StoreNode, keys: Sequence[BlockKey], deadline: Deadline, ttl_s: float | None = None) -> NodeLease:
    """Leases the longest run of leading keys that the node holds. Raises PeerLost, DeadlineExceeded.

    Without `ttl_s`, the lease lasts as long as reading its objects may take.
    """
    first_s = deadline.ttl_s() if ttl_s is None else ttl_s
    store = node.attached(deadline).endpoint
    steps = leased(store, new_id("lease"), keys, first_s, time.monotonic())
    lease = NodeLease(node, node.run(steps, deadline))
    deadline.allow(sum(entry.length for entry in lease.entries))
    lasts = ttl_s is not None or lease.held.expires_at >= time.monotonic() + deadline.left_s()
    if lease.entries and not lasts:
        lease.renew(deadline.ttl_s(), deadline)
    return lease


def each_run(node: StoreNode, keys: Sequence[BlockKey], deadline: Deadline) -> Iterator[tuple[int, NodeLease]]:
    """Yields leases on all keys that exist, each with the place of its first key. A lease is valid until the next one.

    A lease stops at the first absent key; the next one begins after it.
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
    """Reads the leased objects of a slice into their spots. Raises StaleLease, InvalidRequest if one does not fit."""
    runs, entries = [], lease.entries[part]
    for place, entry in enumerate(entries):
        if entry.length > spots.rooms[place]:
            raise too_small(entry.length, int(spots.rooms[place]))
        runs.append((entry.offset, int(spots.offsets[place]), entry.length))
    read(engine, lease.held.segment, spots.segment, runs, deadline)
    lease.require_valid()
    return [
        entry.length if not verify or matches(entry, spots, place) else Fate.CORRUPT
        for place, entry in enumerate(entries)
    ]
