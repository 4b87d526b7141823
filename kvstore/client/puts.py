"""Stores objects at the first ranked node that has room, in one round trip or by a reservation.

Uncommitted reservations are given back. An equal value that is already stored, or that another writer is storing,
counts as stored; a different value is refused. A different value is noticed only at the node that would store this one,
not at other nodes that hold replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial

from moonserve.kvstore.client.cluster import Cluster
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.deadline import Deadline
from moonserve.kvstore.client.node_access.lease_and_put import PutOptions, abort_call, put_steps
from moonserve.kvstore.client.node_access.node import ClientResources, StoreNode
from moonserve.kvstore.client.node_access.node_reads import NodeReads
from moonserve.kvstore.client.node_access.objects import PutItem, ReadMiss
from moonserve.kvstore.client.placement import LocationHints
from moonserve.kvstore.state.objects import PutOutcome
from moonserve.protocol.errors import (
    DeadlineExceeded,
    IntegrityError,
    InvalidRequest,
    MoonserveError,
    Overloaded,
    PeerLost,
    StaleLease,
)
from moonserve.protocol.request import new_id

_MAX_NODES = 4
"""Number of nodes tried. The cluster counts as full if none of them has room."""
_WAIT_SHARE = 0.9
"""Share of the remaining time spent waiting for other writers of the same keys; the rest is for reporting a failure."""
_FULL_RETRY_S = 1.0


class OtherWriterUnfinished(DeadlineExceeded):
    """Raised if another writer of the key did not finish in time although the node kept answering."""


class Puts:
    """Thread-safe puts over all nodes of a cluster."""

    def __init__(self, cluster: Cluster, resources: ClientResources, at_node: NodeReads, hints: LocationHints) -> None:
        self._cluster = cluster
        self._resources = resources
        self._at_node = at_node
        self._hints = hints

    def put(self, items: Sequence[PutItem], slots: BufferSlots, terms: PutOptions, deadline: Deadline) -> None:
        """Stores items, each of which fills its slot. All are stored when it returns; when it raises, some may be.

        Raises InvalidRequest (another value is stored, or the value can never fit), Overloaded (no room at the ranked
        nodes), IntegrityError (a value arrived damaged), PeerLost, DeadlineExceeded, NoWorker.
        """
        ranked = self._cluster.view.ranked([item.block.head for item in items])
        waiting = {place: nodes[:_MAX_NODES] for place, nodes in enumerate(ranked)}
        errors: dict[int, MoonserveError] = {}
        while waiting:
            groups = _group_by_node(waiting, errors)
            tries = []
            for node, places in groups.items():
                attempt = deadline.half_left() if any(waiting[place] for place in places) else deadline
                some = [items[place] for place in places]
                tries.append(partial(self._try, node, some, slots.at(places), terms, attempt))
            tried = self._resources.run_concurrently(tries)
            for (node, places), failed in zip(groups.items(), tried, strict=True):
                for place, error in zip(places, failed, strict=True):
                    if error is not None:
                        errors[place] = error
                        continue
                    del waiting[place]
                    if node is not ranked[place][0]:
                        self._hints.note(items[place].key, node.node_id)

    def _try(
        self,
        node: StoreNode,
        items: Sequence[PutItem],
        slots: BufferSlots,
        terms: PutOptions,
        deadline: Deadline,
    ) -> Sequence[MoonserveError | None]:
        """Tries one node. Returns for each item None if it is stored, else the reason why not."""
        try:
            puts = self._put_at(node, items, slots, terms, deadline)
        except (Overloaded, PeerLost, DeadlineExceeded, StaleLease) as error:
            silent = isinstance(error, PeerLost | DeadlineExceeded)
            if silent and not isinstance(error, OtherWriterUnfinished) and deadline.was_ample():
                node.mark_lost(error)
            return [error] * len(items)
        quota = f", or tenant {terms.tenant!r} has a quota that this does not fit into" if terms.tenant else ""
        refused = Overloaded(f"the store is full of objects in use{quota}", retry_after_s=_FULL_RETRY_S)
        return [refused if put is PutOutcome.FULL else None for put in puts]

    def _put_at(
        self,
        node: StoreNode,
        items: Sequence[PutItem],
        slots: BufferSlots,
        terms: PutOptions,
        deadline: Deadline,
    ) -> list[PutOutcome]:
        """Returns the outcome of each item: PRESENT, FULL or STORED."""
        puts = node.put_inline(items, slots, terms, deadline)
        _require_undamaged(puts)
        self._write(node, items, slots, terms, deadline, puts, PutOutcome.LATER)
        while PutOutcome.IN_PROGRESS in puts and not terms.keeps_present:
            if not self._write(node, items, slots, terms, deadline, puts, PutOutcome.IN_PROGRESS):
                # The node answers as soon as it grants one. If it granted none, it waited its full time.
                break
        if not terms.keeps_present:
            self._require_same(node, items, puts, deadline)
        return puts

    def _write(
        self,
        node: StoreNode,
        items: Sequence[PutItem],
        slots: BufferSlots,
        terms: PutOptions,
        deadline: Deadline,
        puts: list[PutOutcome],
        which: PutOutcome,
    ) -> bool:
        """Stores items with outcome `which` by a reservation; True if one was stored. An error leaves none behind."""
        places = [place for place, put in enumerate(puts) if put is which]
        if not places:
            return False
        left_s = deadline.left_s()
        wait_s = left_s * _WAIT_SHARE if which is PutOutcome.IN_PROGRESS else 0.0
        some, there = [items[place] for place in places], slots.at(places)
        address = node.attached(deadline).data.address
        name = new_id("put")
        try:
            steps = put_steps(address, name, some, there, terms, left_s, wait_s=wait_s)
            written = node.run(steps, deadline)
        except BaseException:  # other writers wait for the space and for the keys
            with contextlib.suppress(PeerLost):  # this client is closed
                self._resources.background.start(node.give_back(abort_call(name)))
            raise
        for place, put in zip(places, written, strict=True):
            puts[place] = put
        _require_undamaged(written)
        return PutOutcome.STORED in written

    def _require_same(
        self, node: StoreNode, items: Sequence[PutItem], puts: Sequence[PutOutcome], deadline: Deadline
    ) -> None:
        """Raises InvalidRequest if a key holds another value, OtherWriterUnfinished if another writer did not finish in
        time."""
        if PutOutcome.IN_PROGRESS in puts:
            raise OtherWriterUnfinished("another writer of this key did not finish in time")
        present = [item for item, put in zip(items, puts, strict=True) if put is PutOutcome.PRESENT]
        if not present:
            return
        entries = self._at_node.entries(node, [item.key for item in present], deadline)
        for item, entry in zip(present, entries, strict=True):
            if isinstance(entry, ReadMiss):  # removed since, so it was present
                continue
            if (entry.length, entry.checksum) != (item.length, item.checksum):
                raise InvalidRequest("another value is stored under this key; remove it first", key=item.key.hex())


def _require_undamaged(puts: Sequence[PutOutcome]) -> None:
    if num_corrupt := puts.count(PutOutcome.CORRUPT):
        raise IntegrityError(f"{num_corrupt} of {len(puts)} values arrived damaged and were dropped")


def _group_by_node(
    waiting: Mapping[int, list[StoreNode]], errors: Mapping[int, MoonserveError]
) -> Mapping[StoreNode, list[int]]:
    """Groups places by the node to try next, which leaves `waiting`. Raises the last error if no node is left."""
    groups: dict[StoreNode, list[int]] = {}
    for place, nodes in waiting.items():
        if not nodes:
            raise errors[place]
        groups.setdefault(nodes.pop(0), []).append(place)
    return groups
