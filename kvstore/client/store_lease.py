"""Views of stored objects that stay in place while a lease on them is kept.

The lease is renewed in the background while it is open. If it could not be renewed, everything read through the views
must be discarded; `check` and the end of the `with` block raise in that case.
"""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Sequence

import xxhash

from moonserve.kvstore.client.node_access.deadline import Deadline
from moonserve.kvstore.client.node_access.mapped_and_remote import read_runs
from moonserve.kvstore.client.node_access.node import ClientResources, StoreNode
from moonserve.kvstore.client.node_access.node_reads import NodeLease, select, take_lease
from moonserve.kvstore.client.node_access.objects import Keys, ReadMiss
from moonserve.kvstore.client.reads import Reads
from moonserve.protocol.kv_blocks import BlockKey

_RENEWALS = 3
"""Renewal attempts within the lifetime of a lease."""


class StoreLease(contextlib.AbstractContextManager["StoreLease"]):
    """A lease on objects at any number of nodes. Use it as a context manager. Belongs to one thread."""

    def __init__(self, resources: ClientResources, ttl_s: float) -> None:
        self.views: tuple[memoryview | None, ...] = ()
        """Read-only, one per key; None if no node has the object. Mapped on the node's host, otherwise a copy."""
        self._resources = resources
        self._ttl_s = ttl_s
        self._leases: list[NodeLease] = []
        self._unused: list[NodeLease] = []
        """Leases at nodes that failed before everything was read: no view depends on them."""
        self._memory = contextlib.ExitStack()
        self._renewing: concurrent.futures.Future[None] | None = None

    def open(self, reads: Reads, keys: Keys, deadline: Deadline, *, verify: bool) -> "StoreLease":
        """Takes the leases. Raises as `Reads.values`."""

        def at(node: StoreNode, places: Sequence[int], within: Deadline) -> list[memoryview | ReadMiss]:
            return self._take(node, select(keys.stored, places), within, verify=verify)

        try:
            self.views = tuple(reads.search(keys, at, deadline))
            if self._leases:
                self._renewing = self._resources.background.start(self._renew())
        except BaseException:  # also on interruption: give back the leases taken so far
            self.close()
            raise
        return self

    def check(self) -> None:
        """Raises StaleLease if anything read so far must be discarded."""
        for lease in self._leases:
            lease.require_valid()

    def close(self) -> None:
        """Releases everything; the views cannot be used any more. Idempotent."""
        if self._renewing is not None:
            self._renewing.cancel()
        for view in self.views:
            if view is not None:
                with contextlib.suppress(BufferError):  # the caller still has an array over it
                    view.release()
        leases = [*self._leases, *self._unused]
        self._leases, self._unused = [], []
        for lease in leases:
            lease.close()
        self._memory.close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.check()
        finally:
            self.close()

    def _take(
        self, node: StoreNode, keys: Sequence[BlockKey], deadline: Deadline, *, verify: bool
    ) -> list[memoryview | ReadMiss]:
        fates: list[memoryview | ReadMiss] = [ReadMiss.ABSENT] * len(keys)
        leases: list[NodeLease] = []
        first = 0
        try:
            while first < len(keys):
                lease = take_lease(node, keys[first:], deadline, self._ttl_s)
                leases.append(lease)
                last = first + len(lease.entries)
                fates[first:last] = self._views(node, lease, deadline, verify=verify)
                first = last + 1
        except BaseException:
            self._unused.extend(leases)
            raise
        self._leases.extend(leases)
        return fates

    def _views(
        self, node: StoreNode, lease: NodeLease, deadline: Deadline, *, verify: bool
    ) -> list[memoryview | ReadMiss]:
        near = node.attached(deadline).mapped
        if near is not None:
            views = [near.view(entry.offset, entry.length) for entry in lease.entries]
        else:
            views = self._copies(lease, deadline)
        if not verify:
            return list(views)
        return [
            view if xxhash.xxh3_64_intdigest(view) == entry.checksum else ReadMiss.CORRUPT
            for view, entry in zip(views, lease.entries, strict=True)
        ]

    def _copies(self, lease: NodeLease, deadline: Deadline) -> list[memoryview]:
        lengths = [entry.length for entry in lease.entries]
        local = self._memory.enter_context(self._resources.scratch.borrow(sum(lengths) or 1))
        runs, views, at = [], [], 0
        for entry in lease.entries:
            runs.append((entry.offset, at, entry.length))
            views.append(local.buffer[at : at + entry.length].toreadonly())
            at += entry.length
        read_runs(self._resources.engine, lease.lease.segment, local, runs, deadline)
        return views

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / _RENEWALS)
            await asyncio.gather(*(lease.renew_in_background(self._ttl_s) for lease in self._leases))
