"""Stores objects at the first ranked node that has room, in one round trip or by a reservation.

Uncommitted reservations are given back. An equal value that is already stored, or that another writer is storing,
counts as stored; a different value is refused. A different value is noticed only at the node that would store this one,
not at other nodes that hold replicas.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
                puts = PutsAtNode(self._resources, self._at_node, node, some, slots.at(places), terms, attempt)
                tries.append(puts.run)
            tried = self._resources.run_concurrently(tries)
            for (node, places), failed in zip(groups.items(), tried, strict=True):
                for place, error in zip(places, failed, strict=True):
                    if error is not None:
                        errors[place] = error
                        continue
                    del waiting[place]
                    if node is not ranked[place][0]:
                        self._hints.note(items[place].key, node.node_id)


@dataclass(frozen=True, slots=True)
class PutsAtNode:
    """Puts of items at one node, each of which fills its slot."""

    resources: ClientResources
    reads: NodeReads
    node: StoreNode
    items: Sequence[PutItem]
    slots: BufferSlots
    terms: PutOptions
    deadline: Deadline

    def run(self) -> Sequence[MoonserveError | None]:
        """Returns for each item None if it is stored, else the reason why not."""
        try:
            puts = self._put()
        except (Overloaded, PeerLost, DeadlineExceeded, StaleLease) as error:
            silent = isinstance(error, PeerLost | DeadlineExceeded)
            if silent and not isinstance(error, OtherWriterUnfinished) and self.deadline.was_ample():
                self.node.mark_lost(error)
            return [error] * len(self.items)
        tenant = self.terms.tenant
        quota = f", or tenant {tenant!r} has a quota that this does not fit into" if tenant else ""
        refused = Overloaded(f"the store is full of objects in use{quota}", retry_after_s=_FULL_RETRY_S)
        return [refused if put is PutOutcome.FULL else None for put in puts]

    def _put(self) -> list[PutOutcome]:
        """Returns the outcome of each item: PRESENT, FULL or STORED."""
        puts = self.node.put_inline(self.items, self.slots, self.terms, self.deadline)
        _require_undamaged(puts)
        self._write(puts, PutOutcome.LATER)
        while PutOutcome.IN_PROGRESS in puts and not self.terms.keeps_present:
            if not self._write(puts, PutOutcome.IN_PROGRESS):
                # The node answers as soon as it grants one. If it granted none, it waited its full time.
                break
        if not self.terms.keeps_present:
            self._require_same(puts)
        return puts

    def _write(self, puts: list[PutOutcome], which: PutOutcome) -> bool:
        """Stores items with outcome `which` by a reservation; True if one was stored. An error leaves none behind."""
        places = [place for place, put in enumerate(puts) if put is which]
        if not places:
            return False
        left_s = self.deadline.left_s()
        wait_s = left_s * _WAIT_SHARE if which is PutOutcome.IN_PROGRESS else 0.0
        some, there = [self.items[place] for place in places], self.slots.at(places)
        address = self.node.attached(self.deadline).data.address
        name = new_id("put")
        try:
            steps = put_steps(address, name, some, there, self.terms, left_s, wait_s=wait_s)
            written = self.node.run(steps, self.deadline)
        except BaseException:  # other writers wait for the space and for the keys
            with contextlib.suppress(PeerLost):  # this client is closed
                self.resources.background.start(self.node.give_back(abort_call(name)))
            raise
        for place, put in zip(places, written, strict=True):
            puts[place] = put
        _require_undamaged(written)
        return PutOutcome.STORED in written

    def _require_same(self, puts: Sequence[PutOutcome]) -> None:
        """Raises InvalidRequest if a key holds another value, OtherWriterUnfinished if another writer did not finish in
        time."""
        if PutOutcome.IN_PROGRESS in puts:
            raise OtherWriterUnfinished("another writer of this key did not finish in time")
        present = [item for item, put in zip(self.items, puts, strict=True) if put is PutOutcome.PRESENT]
        if not present:
            return
        entries = self.reads.entries(self.node, [item.key for item in present], self.deadline)
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
