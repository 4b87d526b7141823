"""Reads objects of one node by the fastest available way: mapped memory, one-sided reads, or a lease.

A lease loads the objects into memory and keeps them in place. It is the slow way, for objects that are only on disk or
keep moving. Bytes do not count if the lease may have ended while they were read. Knows no other nodes.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeVar

from moonserve.kvstore.client.node_access.buffers import BufferSlots, portions
from moonserve.kvstore.client.node_access.deadline import Deadline, ttl_for
from moonserve.kvstore.client.node_access.inline_client import GET_BYTES, GET_KEYS
from moonserve.kvstore.client.node_access.lease_and_put import (
    GIVE_BACK_TIMEOUT_S,
    lease_steps,
    release_call,
    renew_call,
)
from moonserve.kvstore.client.node_access.mapped_and_remote import (
    MappedObjects,
    RemoteObjects,
    fitting_length,
    matches,
    read_runs,
)
from moonserve.kvstore.client.node_access.node import Attachment, ClientResources, StoreNode
from moonserve.kvstore.client.node_access.objects import (
    LeasedObject,
    ReadLease,
    ReadMiss,
    require_lengths,
)
from moonserve.kvstore.client.node_access.use_reports import ClientCounters, ClientEvent, UseReports
from moonserve.kvstore.index_layout import Entry
from moonserve.protocol.errors import MoonserveError, StaleLease
from moonserve.protocol.kv_blocks import BlockKey, pack_keys
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.request import new_id
from moonserve.transfer import Op, ScatterTransfer, TransferEngine

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class NodeLease:
    """A lease at one node, with the means to renew and release it."""

    node: StoreNode
    lease: ReadLease

    @property
    def entries(self) -> Sequence[LeasedObject]:
        return self.lease.objects

    def require_valid(self) -> None:
        """Raises StaleLease if the lease may have ended; otherwise everything read so far counts."""
        if time.monotonic() >= self.lease.expires_at:
            raise StaleLease("the read lease has expired", lease_id=self.lease.lease_id)

    def renew(self, ttl_s: float, deadline: Deadline) -> None:
        """Renews the lease. Raises StaleLease if it has ended."""
        expires_at = time.monotonic() + ttl_s
        self.node.call(*renew_call(self.lease.lease_id, ttl_s), deadline)
        self.lease = replace(self.lease, expires_at=expires_at)

    async def renew_in_background(self, ttl_s: float) -> None:
        """Renews the lease from the background loop. A lease that has ended becomes invalid."""
        expires_at = time.monotonic() + ttl_s
        try:
            await self.node.call_in_background(*renew_call(self.lease.lease_id, ttl_s), GIVE_BACK_TIMEOUT_S)
        except StaleLease:
            expires_at = 0.0
        except MoonserveError as error:  # the lease expires unless a later attempt succeeds
            log.warning("lease %s was not renewed: %s", self.lease.lease_id, error)
            return
        self.lease = replace(self.lease, expires_at=expires_at)

    def close(self) -> None:
        """Releases the lease and waits for the node, so that its space can be reused. No error if the node is gone."""
        if not self.entries:
            return
        try:
            self.node.call(*release_call(self.lease.lease_id), Deadline(GIVE_BACK_TIMEOUT_S))
        except MoonserveError as error:
            log.info("lease %s cannot be released: %s", self.lease.lease_id, error)


def take_lease(node: StoreNode, keys: Sequence[BlockKey], deadline: Deadline, ttl_s: float | None = None) -> NodeLease:
    """Leases the longest run of leading keys that the node holds. Raises PeerLost, DeadlineExceeded.

    Without `ttl_s`, the lease lasts as long as reading its objects may take.
    """
    first_s = ttl_for(deadline.left_s()) if ttl_s is None else ttl_s
    store = node.attached(deadline).endpoint
    steps = lease_steps(store, new_id("lease"), keys, first_s, time.monotonic())
    lease = NodeLease(node, node.run(steps, deadline))
    deadline.extend_for_bytes(sum(entry.length for entry in lease.entries))
    lasts = ttl_s is not None or lease.lease.expires_at >= time.monotonic() + deadline.left_s()
    if lease.entries and not lasts:
        lease.renew(ttl_for(deadline.left_s()), deadline)
    return lease


def leases_on_runs(node: StoreNode, keys: Sequence[BlockKey], deadline: Deadline) -> Iterator[tuple[int, NodeLease]]:
    """Yields leases on all keys that exist, each with the place of its first key. A lease is valid until the next one.

    A lease stops at the first absent key; the next one begins after it.
    """
    first = 0
    while first < len(keys):
        with closing(take_lease(node, keys[first:], deadline)) as lease:
            yield first, lease
        first += len(lease.entries) + 1


def read_leased(
    engine: TransferEngine,
    lease: NodeLease,
    part: slice,
    slots: BufferSlots,
    *,
    verify: bool,
    deadline: Deadline,
) -> list[int | ReadMiss]:
    """Reads the leased objects of a slice into their slots. Raises StaleLease, InvalidRequest if one does not fit."""
    entries = lease.entries[part]
    runs = [
        (entry.offset, int(slots.offsets[place]), fitting_length(entry, slots, place))
        for place, entry in enumerate(entries)
    ]
    read_runs(engine, lease.lease.segment, slots.segment, runs, deadline)
    lease.require_valid()
    return [
        entry.length if not verify or matches(entry, slots, place) else ReadMiss.CORRUPT
        for place, entry in enumerate(entries)
    ]


T = TypeVar("T")
Keys = Sequence[BlockKey]
ReadInto = Callable[[slice, BufferSlots], Sequence[int | ReadMiss]]
"""Reads a slice of a batch into the given slots."""


class NodeReads:
    """Thread-safe reads at the node given with each call, which is asked only for objects that need a lease.

    Returns a `ReadMiss` for every object that is not read; raises PeerLost or DeadlineExceeded if the node does not
    answer.
    """

    def __init__(self, resources: ClientResources, touches: UseReports, counters: ClientCounters) -> None:
        self._resources = resources
        self._touches = touches
        self._counters = counters

    def values(self, node: StoreNode, keys: Keys, deadline: Deadline, *, verify: bool) -> list[bytes | ReadMiss]:
        return self._read(
            node,
            keys,
            lambda near: near.values(keys, verify=verify),
            lambda far: self._far_values(far, keys, deadline),
            lambda some: self._leased_values(node, select(keys, some), deadline, verify=verify),
            deadline,
        )

    def into(
        self, node: StoreNode, keys: Keys, slots: BufferSlots, deadline: Deadline, *, verify: bool
    ) -> list[int | ReadMiss]:
        """Reads objects into their slots and returns the lengths. Raises InvalidRequest if an object does not fit."""
        return self._read(
            node,
            keys,
            lambda near: near.into(pack_keys(keys), slots, verify=verify),
            lambda far: far.read(keys, slots, deadline),
            lambda some: self._leased_into(node, select(keys, some), slots.at(some), deadline, verify=verify),
            deadline,
        )

    def scatter(self, node: StoreNode, keys: Keys, slots: BufferSlots, deadline: Deadline) -> list[int | ReadMiss]:
        """Reads objects into slots of several pieces and returns their checksums. Objects with ReadMiss.ASK are not
        read.

        Raises InvalidRequest for an object of another length.
        """
        fates: list[int | ReadMiss] = _read_mapped_or_remote(
            node,
            lambda near: near.scatter(keys, slots),
            lambda far: far.scatter(keys, slots, deadline),
            deadline,
        )
        self.report_uses(node, keys_read(keys, fates))
        return fates

    def scatter_or_lease(
        self, node: StoreNode, keys: Keys, slots: BufferSlots, deadline: Deadline
    ) -> list[int | ReadMiss]:
        """Reads objects into slots of several pieces, as `scatter`, under a lease where that is needed."""
        return self._read(
            node,
            keys,
            lambda near: near.scatter(keys, slots),
            lambda far: far.scatter(keys, slots, deadline),
            lambda some: self._leased_scattered(node, select(keys, some), slots.at(some), deadline),
            deadline,
        )

    def exist(self, node: StoreNode, keys: Keys, deadline: Deadline) -> list[bool | ReadMiss]:
        """Returns True or ABSENT for each key."""
        fates: list[bool | ReadMiss] = _read_mapped_or_remote(
            node, lambda near: near.exist(keys), lambda far: far.exist(keys, deadline), deadline
        )
        # an empty report: only reports notice the death of a mapped node
        if node.is_mapped:
            self.report_uses(node, b"")
        if places := _to_ask(fates):
            request = kvstore_pb2.StoreExistsRequest(keys=select(keys, places))
            _set_at(fates, places, node.call(lambda stub: stub.Exists, request, deadline).present)
        return [fate if fate is True else ReadMiss.ABSENT for fate in fates]

    def entries(self, node: StoreNode, keys: Keys, deadline: Deadline) -> list[Entry | LeasedObject | ReadMiss]:
        """Returns the entries of the objects without reading them."""
        fates: list[Entry | LeasedObject | ReadMiss] = [
            *_read_mapped_or_remote(
                node,
                lambda near: [near.find(key) for key in keys],
                lambda far: far.find(keys, deadline),
                deadline,
            )
        ]
        places = _to_ask(fates)
        for first, lease in leases_on_runs(node, select(keys, places), deadline):
            for place, entry in zip(places[first:], lease.entries, strict=False):
                fates[place] = entry
        return [ReadMiss.ABSENT if fate is ReadMiss.ASK_NODE else fate for fate in fates]

    def report_uses(self, node: StoreNode, packed_keys: bytes) -> None:
        """Reports that these keys were read without the node's help."""
        self._touches.note(node, packed_keys)

    def _read(
        self,
        node: StoreNode,
        keys: Keys,
        near: Callable[[MappedObjects], list[T | ReadMiss]],
        far: Callable[[RemoteObjects], list[T | ReadMiss]],
        leased: Callable[[Sequence[int]], list[T | ReadMiss]],
        deadline: Deadline,
    ) -> list[T | ReadMiss]:
        fates = _read_mapped_or_remote(node, near, far, deadline)
        if ReadMiss not in set(map(type, fates)):
            self.report_uses(node, pack_keys(keys))
            return fates
        self.report_uses(node, keys_read(keys, fates))
        if places := _to_ask(fates):
            _set_at(fates, places, leased(places))
            self._counters.count(ClientEvent.LEASED_READ, len(places))
        return fates

    def _far_values(self, far: RemoteObjects, keys: Keys, deadline: Deadline) -> list[bytes | ReadMiss]:
        """Returns the values sent with the node's answer, and READs the others."""
        if len(keys) > GET_KEYS:
            first = self._far_values(far, keys[:GET_KEYS], deadline)
            return first + self._far_values(far, keys[GET_KEYS:], deadline)
        fates: list[bytes | ReadMiss] = [ReadMiss.ABSENT] * len(keys)
        with self._resources.scratch.borrow(GET_BYTES) as local:
            found, slots = far.find_or_read(keys, local, deadline)
            for place, each in enumerate(found):
                if isinstance(each, int):
                    fates[place] = bytes(slots.memory(place, each))
                elif isinstance(each, ReadMiss):
                    fates[place] = each
        places = [place for place, each in enumerate(found) if isinstance(each, Entry)]
        entries = [each for each in found if isinstance(each, Entry)]

        def read(part: slice, slots: BufferSlots) -> list[int | ReadMiss]:
            return far.read_entries(entries[part], slots, deadline)

        _set_at(fates, places, self._through_scratch([entry.length for entry in entries], read))
        return fates

    def _leased_values(
        self, node: StoreNode, keys: Keys, deadline: Deadline, *, verify: bool
    ) -> list[bytes | ReadMiss]:
        fates: list[bytes | ReadMiss] = [ReadMiss.ABSENT] * len(keys)
        for first, lease in leases_on_runs(node, keys, deadline):

            def read(part: slice, slots: BufferSlots) -> list[int | ReadMiss]:
                engine = self._resources.engine
                return read_leased(engine, lease, part, slots, verify=verify, deadline=deadline)  # noqa: B023

            lengths = [entry.length for entry in lease.entries]
            values = self._through_scratch(lengths, read)
            fates[first : first + len(values)] = values
        return fates

    def _leased_into(
        self, node: StoreNode, keys: Keys, slots: BufferSlots, deadline: Deadline, *, verify: bool
    ) -> list[int | ReadMiss]:
        fates: list[int | ReadMiss] = [ReadMiss.ABSENT] * len(keys)
        for first, lease in leases_on_runs(node, keys, deadline):
            last = first + len(lease.entries)
            there = slots.at(range(first, last))
            fates[first:last] = read_leased(
                self._resources.engine, lease, slice(None), there, verify=verify, deadline=deadline
            )
        return fates

    def _leased_scattered(
        self, node: StoreNode, keys: Keys, slots: BufferSlots, deadline: Deadline
    ) -> list[int | ReadMiss]:
        fates: list[int | ReadMiss] = [ReadMiss.ABSENT] * len(keys)
        for first, lease in leases_on_runs(node, keys, deadline):
            there = slots.at(range(first, first + len(lease.entries)))
            require_lengths(lease.lease, there)
            rows = there.rows([entry.offset for entry in lease.entries])
            if len(rows):
                transfer = ScatterTransfer(Op.READ, there.segment, lease.lease.segment, rows)
                self._resources.engine.run([transfer], deadline_s=deadline.left_s())
            lease.require_valid()
            for place, entry in enumerate(lease.entries):
                intact = there.checksum(place) == entry.checksum
                fates[first + place] = entry.checksum if intact else ReadMiss.CORRUPT
        return fates

    def _through_scratch(self, lengths: Sequence[int], read: ReadInto) -> list[bytes | ReadMiss]:
        """Reads values for which the caller has no memory, through scratch memory."""
        values: list[bytes | ReadMiss] = []
        for part in portions(lengths):
            some = lengths[part]
            with self._resources.scratch.borrow(sum(some) or 1) as local:
                slots = BufferSlots.packed(local, some)
                values += [
                    fate if isinstance(fate, ReadMiss) else bytes(slots.memory(place, fate))
                    for place, fate in enumerate(read(part, slots))
                ]
        return values


def keys_read(keys: Keys, fates: Sequence[object]) -> bytes:
    """Returns the keys that were read, back to back."""
    if ReadMiss not in set(map(type, fates)):  # faster than a Python loop
        return pack_keys(keys)
    return pack_keys([k for k, fate in zip(keys, fates, strict=True) if not isinstance(fate, ReadMiss)])


def select(items: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    return items if len(places) == len(items) else [items[place] for place in places]


def _read_mapped_or_remote(
    node: StoreNode,
    near: Callable[[MappedObjects], list[T | ReadMiss]],
    far: Callable[[RemoteObjects], list[T | ReadMiss]],
    deadline: Deadline,
) -> list[T | ReadMiss]:
    """Reads through mapped memory if there is any, else remotely."""

    def read(way: Attachment) -> list[T | ReadMiss]:
        if way.mapped is not None:
            return near(way.mapped)
        assert way.remote is not None
        return far(way.remote)

    return node.with_current_index(read, deadline)


def _to_ask(fates: Sequence[object]) -> list[int]:
    return [place for place, fate in enumerate(fates) if fate is ReadMiss.ASK_NODE]


def _set_at(into: list[T | ReadMiss], places: Sequence[int], fates: Sequence[T | ReadMiss]) -> None:
    for place, fate in zip(places, fates, strict=True):
        into[place] = fate
