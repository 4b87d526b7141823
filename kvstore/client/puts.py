"""Storing objects: at the first node of their rank that takes them, in one round trip or by a reservation.

Its rule: what was not committed is given back; an equal value that is there already, or that another writer stores
meanwhile, counts as stored, another value is refused. Another value is noticed where this one would be stored, not at
nodes that hold it for other reasons.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial

from kvstore.client.at_node import AtNode
from kvstore.client.cluster import Cluster
from kvstore.client.deadline import Deadline
from kvstore.client.node import Means, StoreNode
from kvstore.client.objects import Fate, Item
from kvstore.client.rights import Terms, abort, stored
from kvstore.client.search import Hints
from kvstore.client.spots import Spots
from kvstore.promises import Outcome
from protocol.errors import (
    DeadlineExceeded,
    IntegrityError,
    InvalidRequest,
    MoonserveError,
    Overloaded,
    PeerLost,
    StaleLease,
)
from protocol.ids import new_id

_MAX_NODES = 4
"""A cluster where so many nodes in a row have no room is full."""
_WAIT_SHARE = 0.9
"""Of the time left for other writers of the same keys; the rest is for saying so."""
_FULL_RETRY_S = 1.0


class Unfinished(DeadlineExceeded):
    """By another writer of the key, while the node answered all the time."""


class Puts:
    """Thread-safe."""

    def __init__(self, cluster: Cluster, means: Means, at_node: AtNode, hints: Hints) -> None:
        self._cluster = cluster
        self._means = means
        self._at_node = at_node
        self._hints = hints

    def put(self, items: Sequence[Item], spots: Spots, terms: Terms, deadline: Deadline) -> None:
        """Each fills its spot. All are stored when it returns; when it raises, some may be.

        Raises InvalidRequest (another value is there, or it can never fit), Overloaded (no room at the nodes of its
        rank), IntegrityError (arrived damaged), PeerLost, DeadlineExceeded, NoWorker.
        """
        ranked = self._cluster.view.ranked([item.block.head for item in items])
        waiting = {place: nodes[:_MAX_NODES] for place, nodes in enumerate(ranked)}
        errors: dict[int, MoonserveError] = {}
        while waiting:
            groups = _grouped(waiting, errors)
            tries = []
            for node, places in groups.items():
                attempt = deadline.half() if any(waiting[place] for place in places) else deadline
                some = [items[place] for place in places]
                tries.append(partial(self._try, node, some, spots.at(places), terms, attempt))
            tried = self._means.together(tries)
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
        items: Sequence[Item],
        spots: Spots,
        terms: Terms,
        deadline: Deadline,
    ) -> Sequence[MoonserveError | None]:
        """Of each, why it is not stored at this node now."""
        try:
            puts = self._put_at(node, items, spots, terms, deadline)
        except (Overloaded, PeerLost, DeadlineExceeded, StaleLease) as error:
            silent = isinstance(error, PeerLost | DeadlineExceeded)
            if silent and not isinstance(error, Unfinished) and deadline.fair():
                node.lost(error)
            return [error] * len(items)
        refused = Overloaded(_why_full(terms.tenant), retry_after_s=_FULL_RETRY_S)
        return [refused if put is Outcome.FULL else None for put in puts]

    def _put_at(
        self,
        node: StoreNode,
        items: Sequence[Item],
        spots: Spots,
        terms: Terms,
        deadline: Deadline,
    ) -> list[Outcome]:
        """What became of each: PRESENT, FULL or STORED."""
        puts = node.put_at_once(items, spots, terms, deadline)
        _require_undamaged(puts)
        self._write(node, items, spots, terms, deadline, puts, Outcome.LATER)
        while Outcome.IN_PROGRESS in puts:
            if not self._write(node, items, spots, terms, deadline, puts, Outcome.IN_PROGRESS):
                break  # else the node did not wait for the rest
        self._require_same(node, items, puts, deadline)
        return puts

    def _write(
        self,
        node: StoreNode,
        items: Sequence[Item],
        spots: Spots,
        terms: Terms,
        deadline: Deadline,
        puts: list[Outcome],
        which: Outcome,
    ) -> bool:
        """Tries those again, the long way; whether one was stored. An error leaves no reservation behind."""
        places = [place for place, put in enumerate(puts) if put is which]
        if not places:
            return False
        left_s = deadline.left_s()
        wait_s = left_s * _WAIT_SHARE if which is Outcome.IN_PROGRESS else 0.0
        some, there = [items[place] for place in places], spots.at(places)
        address = node.attached(deadline).data.address
        name = new_id("put")
        try:
            steps = stored(address, name, some, there, terms, left_s, wait_s=wait_s)
            written = node.run(steps, deadline)
        except BaseException:  # others wait for the space and for the keys
            with contextlib.suppress(PeerLost):  # this client is closed
                self._means.backstage.begin(node.undo(abort(name)))
            raise
        for place, put in zip(places, written, strict=True):
            puts[place] = put
        _require_undamaged(written)
        return Outcome.STORED in written

    def _require_same(
        self, node: StoreNode, items: Sequence[Item], puts: Sequence[Outcome], deadline: Deadline
    ) -> None:
        """Raises InvalidRequest when another value is stored under one of the keys, Unfinished."""
        if Outcome.IN_PROGRESS in puts:
            raise Unfinished("another writer of this key did not finish in time")
        present = [item for item, put in zip(items, puts, strict=True) if put is Outcome.PRESENT]
        if not present:
            return
        entries = self._at_node.entries(node, [item.key for item in present], deadline)
        for item, entry in zip(present, entries, strict=True):
            if isinstance(entry, Fate):  # removed since: then it had been there
                continue
            if (entry.length, entry.checksum) != (item.length, item.checksum):
                raise InvalidRequest("another value is stored under this key; remove it first", key=item.key.hex())


def _require_undamaged(puts: Sequence[Outcome]) -> None:
    if num_corrupt := puts.count(Outcome.CORRUPT):
        raise IntegrityError(f"{num_corrupt} of {len(puts)} values arrived damaged and were dropped")


def _why_full(tenant: str) -> str:
    quota = f", or tenant {tenant!r} has a quota that this does not fit into" if tenant else ""
    return f"the store is full of objects in use{quota}"


def _grouped(
    waiting: Mapping[int, list[StoreNode]], errors: Mapping[int, MoonserveError]
) -> Mapping[StoreNode, list[int]]:
    """Places by the node that is to be tried next, which leaves `waiting`. Raises why there is none left."""
    groups: dict[StoreNode, list[int]] = {}
    for place, nodes in waiting.items():
        if not nodes:
            raise errors[place]
        groups.setdefault(nodes.pop(0), []).append(place)
    return groups
