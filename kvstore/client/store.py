"""The synchronous client of the KV store: stores and reads values by key, from any number of threads.

Every call is bounded in time and raises only errors derived from `MoonserveError`. Once a call has returned or raised,
no transfer touches the caller's memory. This module holds the public API only; the modules below it choose the nodes.
"""

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moonserve.kvstore.client.cluster import (
    Cluster,
    NodeStats,
    NodeView,
    PoolStats,
    call_all,
    call_all_or_raise,
    change_replica,
    new_removal_id,
)
from moonserve.kvstore.client.node_access.buffers import BufferSlots, portions
from moonserve.kvstore.client.node_access.deadline import Deadline
from moonserve.kvstore.client.node_access.lease_and_put import PutOptions
from moonserve.kvstore.client.node_access.node import ClientResources
from moonserve.kvstore.client.node_access.node_reads import NodeReads
from moonserve.kvstore.client.node_access.objects import Key, Keys, PutItem, ReadMiss, block_of, blocks_of
from moonserve.kvstore.client.node_access.use_reports import LAST_REPORTS_S, ClientCounters, UseReports
from moonserve.kvstore.client.placement import LocationHints
from moonserve.kvstore.client.puts import Puts
from moonserve.kvstore.client.reads import Reads
from moonserve.kvstore.client.store_lease import StoreLease
from moonserve.kvstore.disk.base import Pin
from moonserve.kvstore.state.objects import check_tenant, check_ttl
from moonserve.kvstore.wire import pin_to_wire
from moonserve.protocol.errors import DeadlineExceeded, InvalidRequest, PeerLost
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.request import NO_HINTS, CacheHints
from moonserve.transfer import Segment
from moonserve.transfer.memory.segments import Registrable

Value = bytes | bytearray | memoryview

LEASE_TTL_S = 10.0
"""The node's own default (`--lease-ttl-s`), used when the caller gives no TTL."""


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """Result of `KvStore.change_replica`."""

    created: int
    dropped: int
    missing: int
    """Keys that no node holds."""
    failed: int = 0
    """Replicas that could not be created: the node had no room or was lost. Calling again tries another node."""


class KvStore(contextlib.AbstractContextManager["KvStore"]):
    """Thread-safe client of a KV store. Create it with `connect`; `close` it or use it as a context manager.

    Keys are bytes, or blocks of a chain (`chain`). Values are immutable: storing an equal value again succeeds, a
    different value is refused until the first one is removed. `timeout_s` bounds a call; without it, the limit grows
    with the number of bytes (`transfer.config`). `verify=False` skips the comparison with the writer's checksum.

    Every method raises PeerLost if the nodes that may hold a key, or are to store it, cannot be reached; NoWorker if
    the cluster has no node; DeadlineExceeded; InvalidRequest for invalid arguments.
    """

    def __init__(self, cluster: Cluster, resources: ClientResources) -> None:
        self._cluster = cluster
        self._resources = resources
        self._counters = ClientCounters()
        self._touches = UseReports(resources.background, self._counters)
        hints = LocationHints()
        at_node = NodeReads(resources, self._touches, self._counters)
        self._reads = Reads(cluster, resources, at_node, hints, self._counters)
        self._puts = Puts(cluster, resources, at_node, hints)
        self._hints = hints

    # Reading

    def get(self, key: Key, *, timeout_s: float | None = None, verify: bool = True) -> bytes | None:
        """Returns the value, or None if no node has it: never stored, removed, evicted, or every replica damaged."""
        value = self.get_at_once(key, verify=verify)
        if not isinstance(value, ReadMiss):
            return value
        return self._reads.values(Keys([key]), Deadline(timeout_s), verify=verify)[0]

    def get_at_once(self, key: Key, *, verify: bool = True, max_bytes: float = math.inf) -> bytes | ReadMiss | None:
        """Returns the same as `get` without waiting, or ReadMiss.ASK if it had to wait or to copy more than
        `max_bytes`."""
        return self._reads.value_at_once(block_of(key), verify=verify, max_bytes=max_bytes)

    def batch_get(
        self, keys: Sequence[Key], *, timeout_s: float | None = None, verify: bool = True
    ) -> list[bytes | None]:
        """Returns one result per key, each as `get` returns it."""
        return self._reads.values(Keys(keys), Deadline(timeout_s), verify=verify)

    def get_into(
        self,
        key: Key,
        segment: Segment,
        offset: int = 0,
        length: int | None = None,
        *,
        timeout_s: float | None = None,
        verify: bool = True,
    ) -> int | None:
        """Reads a value into registered memory and returns its length in bytes.

        The value may have at most `length` bytes, by default all that follow `offset`; a longer one raises
        InvalidRequest. The memory's content is valid only if a length is returned.
        """
        rooms = None if length is None else [length]
        return self.batch_get_into([key], segment, [offset], rooms, timeout_s=timeout_s, verify=verify)[0]

    def batch_get_into(
        self,
        keys: Sequence[Key],
        segment: Segment,
        offsets: Sequence[int],
        lengths: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
        verify: bool = True,
    ) -> list[int | None]:
        """Reads each value into its slot, as `get_into`. Without lengths, each slot ends where the next one begins."""
        wanted = Keys(keys)
        _require_as_many(len(wanted), len(offsets))
        slots = BufferSlots.checked(segment, offsets, lengths)
        return self._reads.into(wanted, slots, Deadline(timeout_s), verify=verify)

    def batch_get_scattered(
        self, keys: Sequence[Key], slots: BufferSlots, *, timeout_s: float | None = None
    ) -> list[bool]:
        """Reads each value into its slot, whose pieces it fills in order, and tells which values were read and match
        their checksum. A value of another length raises InvalidRequest."""
        wanted = Keys(keys)
        _require_as_many(len(wanted), len(slots.offsets))
        return self._reads.scatter(wanted, slots, Deadline(timeout_s))

    def get_range(
        self,
        key: Key,
        offset: int,
        length: int,
        *,
        timeout_s: float | None = None,
        verify: bool = True,
    ) -> bytes | None:
        """Returns `length` bytes of a value from `offset` on, for example one layer of a block. The value is read in
        place and verified as a whole. Raises InvalidRequest if the range is not within the value."""
        with self.lease([key], timeout_s=timeout_s, verify=verify) as lease:
            view = lease.views[0]
            if view is None:
                return None
            if min(offset, length) < 0 or offset + length > len(view):
                raise InvalidRequest(f"bytes {offset}..{offset + length} are not within a value of {len(view)}")
            return bytes(view[offset : offset + length])

    def lease(
        self,
        keys: Sequence[Key],
        *,
        ttl_s: float = LEASE_TTL_S,
        timeout_s: float | None = None,
        verify: bool = True,
    ) -> StoreLease:
        """Returns a lease with views of the objects in place: `with store.lease(keys) as lease: lease.views[0]`."""
        check_ttl(ttl_s)
        lease = StoreLease(self._resources, ttl_s)
        return lease.open(self._reads, Keys(keys), Deadline(timeout_s), verify=verify)

    def exists(self, key: Key, *, timeout_s: float | None = None) -> bool:
        present = self.exists_at_once(key)
        if not isinstance(present, ReadMiss):
            return present
        return self._reads.exist(Keys([key]), Deadline(timeout_s))[0]

    def exists_at_once(self, key: Key) -> bool | ReadMiss:
        """Returns the same as `exists` without waiting, or ReadMiss.ASK if it would have to wait."""
        return self._reads.exists_at_once(block_of(key))

    def batch_exists(self, keys: Sequence[Key], *, timeout_s: float | None = None) -> list[bool]:
        return self._reads.exist(Keys(keys), Deadline(timeout_s))

    # Writing

    def put(
        self,
        key: Key,
        value: Value,
        *,
        pin: Pin | str = Pin.NONE,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Stores a value. Every client can read it when this returns.

        Raises InvalidRequest (another value is stored under the key, or the value is larger than a node), Overloaded
        (no space could be freed), IntegrityError (the value arrived damaged and was dropped).
        """
        self.batch_put([(key, value)], pin=pin, tenant=tenant, timeout_s=timeout_s)

    def batch_put(
        self,
        items: Iterable[tuple[Key, Value]],
        *,
        pin: Pin | str = Pin.NONE,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Stores several values, as `put`. When it raises, some may be stored."""
        pairs = [(block_of(key), _bytes_of(value)) for key, value in items]
        lengths = [value.nbytes for _, value in pairs]
        terms = _terms(pin, tenant)
        deadline = Deadline(timeout_s, sum(lengths))
        for part in portions(lengths):
            with self._resources.scratch.borrow(sum(lengths[part]) or 1) as local:
                at = 0
                for _, value in pairs[part]:
                    local.buffer[at : at + value.nbytes] = value
                    at += value.nbytes
                some = [PutItem(block, value) for block, value in pairs[part]]
                self._puts.put(some, BufferSlots.packed(local, lengths[part]), terms, deadline)

    def put_from(
        self,
        key: Key,
        segment: Segment,
        offset: int = 0,
        length: int | None = None,
        *,
        pin: Pin | str = Pin.NONE,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Stores a value directly from registered memory, as `put`. The memory must not change during the call."""
        lengths = [segment.nbytes - offset if length is None else length]
        self.batch_put_from([key], segment, [offset], lengths, pin=pin, tenant=tenant, timeout_s=timeout_s)

    def batch_put_from(
        self,
        keys: Sequence[Key],
        segment: Segment,
        offsets: Sequence[int],
        lengths: Sequence[int],
        *,
        pin: Pin | str = Pin.NONE,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> None:
        """Stores several values from registered memory, as `put_from`. When it raises, some may be stored."""
        blocks = blocks_of(keys)
        _require_as_many(len(blocks), len(offsets))
        slots = BufferSlots.checked(segment, offsets, lengths)
        items = [
            PutItem(block, segment.buffer[offset : offset + length])
            for block, offset, length in zip(blocks, offsets, lengths, strict=True)
        ]
        deadline = Deadline(timeout_s, sum(lengths))
        terms = _terms(pin, tenant)
        for part in portions(lengths):
            self._puts.put(items[part], slots.at(range(part.start, part.stop)), terms, deadline)

    def batch_put_gathered(
        self,
        keys: Sequence[Key],
        slots: BufferSlots,
        *,
        hints: CacheHints = NO_HINTS,
        timeout_s: float | None = None,
    ) -> None:
        """Stores values that fill slots of several pieces, as `put_from`. A key that is already stored keeps its value,
        whatever that is: for caches, whose values for a key are equally good. When it raises, some may be stored."""
        blocks = blocks_of(keys)
        _require_as_many(len(blocks), len(slots.offsets))
        items = [PutItem(block, *slots.pieces(place)) for place, block in enumerate(blocks)]
        deadline = Deadline(timeout_s, slots.nbytes)
        terms = PutOptions(hints=hints, keeps_present=True)
        for part in portions(slots.lengths.tolist()):
            self._puts.put(items[part], slots.at(range(part.start, part.stop)), terms, deadline)

    # Memory for `get_into` and `put_from`

    def allocate(self, nbytes: int) -> Segment:
        """Allocates registered memory (`segment.buffer`), which nodes on this host can map."""
        return self._resources.engine.allocate(nbytes)

    def register(self, buffer: Registrable) -> Segment:
        """Registers memory of the caller: numpy arrays, bytearrays, tensors. On one host, `allocate` is faster."""
        return self._resources.engine.register(buffer)

    def deregister(self, segment: Segment) -> None:
        self._resources.engine.deregister(segment)

    # The cluster

    def remove(self, key: Key, *, timeout_s: float | None = None) -> bool:
        """Removes all replicas of a key. Returns True if there was one. Readers under a lease may finish.

        Raises PeerLost if a node that may hold a replica did not answer; the other nodes have removed theirs by then.
        That node, or one that the registry has given up, learns of the removal from the other nodes within seconds of
        answering again, and before it is a member again.
        """
        return self.batch_remove([key], timeout_s=timeout_s) > 0

    def batch_remove(self, keys: Sequence[Key], *, timeout_s: float | None = None) -> int:
        """Removes all replicas of the keys, as `remove`. Returns how many replicas there were."""
        block_keys = [block.key for block in blocks_of(keys)]
        self._hints.forget(block_keys)
        request = kvstore_pb2.StoreRemoveRequest(keys=block_keys, removal_id=new_removal_id())
        replies = call_all_or_raise(self._cluster.view.nodes, lambda stub: stub.Remove, request, Deadline(timeout_s))
        return sum(reply.removed for reply in replies)

    def pin(self, keys: Sequence[Key], kind: Pin | str, *, timeout_s: float | None = None) -> int:
        """Pins all replicas: "soft" (evicted last), "hard" (never evicted), "none". Returns the number of replicas."""
        block_keys = [block.key for block in blocks_of(keys)]
        request = kvstore_pb2.StorePinRequest(keys=block_keys, pin=pin_to_wire(_pin_of(kind)))
        replies = call_all_or_raise(self._cluster.view.nodes, lambda stub: stub.Pin, request, Deadline(timeout_s))
        return sum(reply.pinned for reply in replies)

    def change_replica(
        self, keys: Sequence[Key], num_replicas: int, *, timeout_s: float | None = None
    ) -> ReplicaChange:
        """Sets the number of replicas of each key; a chain's blocks in order. Raises NoWorker without a directory."""
        block_keys = [block.key for block in blocks_of(keys)]
        reply = change_replica(self._resources, self._cluster.view, block_keys, num_replicas, Deadline(timeout_s))
        return ReplicaChange(reply.created, reply.dropped, reply.missing, reply.failed)

    def stats(self, *, timeout_s: float | None = None) -> PoolStats:
        """Returns the statistics of each node that answers, their sum, and this client's own counters."""
        request = kvstore_pb2.StoreStatsRequest()
        replies, errors = call_all(self._cluster.view.nodes, lambda stub: stub.Stats, request, Deadline(timeout_s))
        return PoolStats(
            nodes={node_id: NodeStats.of(reply) for node_id, reply in replies.items()},
            counters={node_id: dict(reply.counters) for node_id, reply in replies.items()},
            unreachable=tuple(errors),
            client=self._counters.all(),
        )

    def nodes(self) -> tuple[NodeView, ...]:
        """Returns the nodes that the registry names."""
        return tuple(
            NodeView(node_id=node.node_id, address=node.address, near=node.is_mapped, resting=node.resting)
            for node in self._cluster.view.nodes
        )

    def close(self) -> None:
        """Closes the client, after reporting its last reads to the nodes. No call may be in flight. Idempotent."""
        with contextlib.suppress(DeadlineExceeded, PeerLost):
            self._touches.flush(LAST_REPORTS_S)
        self._cluster.close()
        self._resources.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _terms(pin: Pin | str, tenant: str) -> PutOptions:
    check_tenant(tenant)
    return PutOptions(pin=_pin_of(pin), tenant=tenant)


def _pin_of(pin: Pin | str) -> Pin:
    try:
        return Pin(pin)
    except ValueError as error:
        names = ", ".join(Pin)
        raise InvalidRequest(f"{pin!r} is not a kind of pin: use one of {names}", param="pin") from error


def _bytes_of(value: Value) -> memoryview:
    try:
        view = memoryview(value)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise InvalidRequest(f"a value is contiguous bytes, not {type(value).__name__}", param="value") from error


def _require_as_many(num_keys: int, num_offsets: int) -> None:
    if num_keys != num_offsets:
        raise InvalidRequest(f"{num_keys} keys with {num_offsets} offsets", param="offsets")
