"""Storing objects: space at a node, one-sided writes into it, and the commit that makes them visible.

Its rule: an object is stored at the first node of its rank that takes it; what was not committed is given back; an
equal value that is there already, or that another writer stores meanwhile, counts as stored, another value is refused.
Another value is noticed where this one would be stored, not at nodes that hold it for other reasons.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.client.at_node import AtNode
from kvstore.client.cluster import Cluster
from kvstore.client.deadline import Deadline
from kvstore.client.express import PUT_BYTES, NotOffered
from kvstore.client.fate import Fate
from kvstore.client.keys import Block
from kvstore.client.node import Attachment, Means, StoreNode
from kvstore.client.search import Hints
from kvstore.disk.base import Pin
from kvstore.express.frames import OUTCOMES, Put
from kvstore.promises import Outcome
from kvstore.wire import pin_to_wire, slots_from_wire
from protocol.checksum import checksum
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
from protocol.pb import kvstore_pb2
from transfer import Op, RemoteSegment, ScatterTransfer, Segment, scatter

_MAX_NODES = 4
"""A cluster where so many nodes in a row have no room is full."""
_WAIT_SHARE = 0.9
"""Of the time left for other writers of the same keys; the rest is for saying so."""
_FULL_RETRY_S = 1.0
_ABORT_S = 2.0
_OUTCOME_OF = {put: outcome for outcome, put in OUTCOMES.items()}


class Unfinished(DeadlineExceeded):
    """By another writer of the key, while the node answered all the time."""


class Item:
    """An object to store, and where its bytes lie in registered memory, which nobody changes meanwhile."""

    __slots__ = ("_checksum", "_source", "block", "offset", "value")

    def __init__(
        self,
        block: Block,
        local: Segment,
        offset: int,
        length: int,
        source: memoryview | None = None,
    ) -> None:
        """There is room in `local`. `source`: what the writer gave, if this is a copy of it."""
        self.block = block
        self.offset = offset
        self.value = local.buffer[offset : offset + length]
        self._source = self.value if source is None else source
        self._checksum: int | None = None

    @property
    def length(self) -> int:
        return len(self.value)

    @property
    def checksum(self) -> int:
        """Of what the writer gave; made when it is first asked for, best while the bytes are on their way."""
        if self._checksum is None:
            self._checksum = checksum([self._source])
        return self._checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which objects are stored."""

    pin: Pin = Pin.NONE
    tenant: str = ""


class Puts:
    """Thread-safe."""

    def __init__(self, cluster: Cluster, means: Means, at_node: AtNode, hints: Hints) -> None:
        self._cluster = cluster
        self._means = means
        self._at_node = at_node
        self._hints = hints

    def put(self, items: Sequence[Item], local: Segment, terms: Terms, deadline: Deadline) -> None:
        """All are stored when it returns; when it raises, some may be.

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
                some = {place: items[place] for place in places}
                tries.append(partial(self._try, node, some, local, terms, attempt))
            for node, failed in zip(groups, self._means.together(tries), strict=True):
                errors.update(failed)
                for place in groups[node]:
                    if place in failed:
                        continue
                    del waiting[place]
                    if node is not ranked[place][0]:
                        self._hints.note(items[place].block.key, node.node_id)

    def _try(
        self,
        node: StoreNode,
        items: Mapping[int, Item],
        local: Segment,
        terms: Terms,
        deadline: Deadline,
    ) -> Mapping[int, MoonserveError]:
        """By place, why what is not stored at this node now is not."""
        try:
            full = self._put_at(node, list(items.values()), local, terms, deadline)
        except (Overloaded, PeerLost, DeadlineExceeded, StaleLease) as error:
            silent = isinstance(error, PeerLost | DeadlineExceeded)
            if silent and not isinstance(error, Unfinished) and deadline.fair():
                node.lost(error)
            return dict.fromkeys(items, error)
        refused = Overloaded(_why_full(terms.tenant), retry_after_s=_FULL_RETRY_S)
        return {place: refused for place, item in items.items() if item in full}

    def _put_at(
        self,
        node: StoreNode,
        items: Sequence[Item],
        local: Segment,
        terms: Terms,
        deadline: Deadline,
    ) -> set[Item]:
        """What had no room there; all others are stored."""
        outcomes = self._send(node, items, terms, deadline)
        later = [item for item in items if item not in outcomes]
        if later:
            outcomes |= self._write(node, later, local, terms, deadline, wait_s=0.0)
        while others := [i for i, outcome in outcomes.items() if outcome is Outcome.IN_PROGRESS]:
            wait_s = deadline.left_s() * _WAIT_SHARE
            fresh = self._write(node, others, local, terms, deadline, wait_s=wait_s)
            outcomes |= fresh
            if Outcome.GRANTED not in fresh.values():
                break  # else the node did not wait for the rest
        self._require_same(node, outcomes, deadline)
        return {item for item, outcome in outcomes.items() if outcome is Outcome.FULL}

    def _send(
        self,
        node: StoreNode,
        items: Sequence[Item],
        terms: Terms,
        deadline: Deadline,
    ) -> dict[Item, Outcome]:
        """As `_write`, in one round trip where the node and the size allow that; without those that have to wait."""

        def send(way: Attachment) -> list[Put]:
            later = [Put.LATER] * len(items)
            if way.express is None or sum(item.length for item in items) > PUT_BYTES:
                return later
            try:
                return way.express.put(
                    [(item.block.key, item.block.parent) for item in items],
                    [item.value for item in items],
                    lambda place: items[place].checksum,
                    deadline,
                    pin=pin_to_wire(terms.pin),
                    tenant=terms.tenant.encode(),
                )
            except NotOffered:
                return later

        puts = node.reading(send, deadline)
        if num_corrupt := puts.count(Put.CORRUPT):
            raise _damaged(num_corrupt, len(items))
        return {
            item: _OUTCOME_OF[put]
            for item, put in zip(items, puts, strict=True)
            if put is not Put.LATER
        }

    def _write(
        self,
        node: StoreNode,
        items: Sequence[Item],
        local: Segment,
        terms: Terms,
        deadline: Deadline,
        *,
        wait_s: float,
    ) -> dict[Item, Outcome]:
        """What became of each; what is GRANTED is visible. An error leaves no reservation behind."""
        request = _reservation(items, terms, deadline, wait_s)
        try:
            reply = node.call(lambda stub: stub.Reserve, request, deadline)
            slots = slots_from_wire(reply)
            granted = [
                (item, slot)
                for item, slot in zip(items, slots, strict=True)
                if slot.outcome is Outcome.GRANTED
            ]
            if granted:
                remote = RemoteSegment(node.attached(deadline).data.address, reply.segment_id)
                rows = scatter.rows(
                    *((slot.offset, item.offset, item.length) for item, slot in granted)
                )
                write = ScatterTransfer(Op.WRITE, local, remote, rows, reply.window_id)
                self._means.engine.run([write], deadline_s=deadline.left_s())
                self._commit(node, request.reservation_id, [i for i, _ in granted], deadline)
        except BaseException:  # others wait for the space and for the keys
            self._abort(node, request.reservation_id)
            raise
        return {item: slot.outcome for item, slot in zip(items, slots, strict=True)}

    def _commit(
        self, node: StoreNode, reservation_id: str, items: Sequence[Item], deadline: Deadline
    ) -> None:
        request = kvstore_pb2.StoreCommitRequest(
            reservation_id=reservation_id,
            keys=[item.block.key for item in items],
            checksums=[item.checksum for item in items],
        )
        reply = node.call(lambda stub: stub.Commit, request, deadline)
        if reply.corrupt:
            raise _damaged(len(reply.corrupt), len(items))

    def _abort(self, node: StoreNode, reservation_id: str) -> None:
        """Behind the scenes; what does not succeed, the reservation's end does."""
        request = kvstore_pb2.StoreAbortRequest(reservation_id=reservation_id)
        with contextlib.suppress(PeerLost):  # this client is closed
            self._means.backstage.begin(_quietly(node, request))

    def _require_same(
        self, node: StoreNode, outcomes: Mapping[Item, Outcome], deadline: Deadline
    ) -> None:
        """Raises InvalidRequest when another value is stored under one of the keys, Unfinished."""
        if Outcome.IN_PROGRESS in outcomes.values():
            raise Unfinished("another writer of this key did not finish in time")
        present = [item for item, outcome in outcomes.items() if outcome is Outcome.PRESENT]
        if not present:
            return
        keys = [item.block.key for item in present]
        entries = self._at_node.entries(node, keys, deadline)
        for item, entry in zip(present, entries, strict=True):
            if isinstance(entry, Fate):  # removed since: then it had been there
                continue
            if (entry.length, entry.checksum) != (item.length, item.checksum):
                raise InvalidRequest(
                    "another value is stored under this key; remove it first",
                    key=item.block.key.hex(),
                )


def _why_full(tenant: str) -> str:
    quota = f", or tenant {tenant!r} has a quota that this does not fit into" if tenant else ""
    return f"the store is full of objects in use{quota}"


def _damaged(num_corrupt: int, num_items: int) -> IntegrityError:
    return IntegrityError(f"{num_corrupt} of {num_items} values arrived damaged and were dropped")


async def _quietly(node: StoreNode, request: kvstore_pb2.StoreAbortRequest) -> None:
    with contextlib.suppress(MoonserveError):
        await node.ask(lambda stub: stub.Abort, request, _ABORT_S)


def _reservation(
    items: Sequence[Item], terms: Terms, deadline: Deadline, wait_s: float
) -> kvstore_pb2.StoreReserveRequest:
    request = kvstore_pb2.StoreReserveRequest(
        reservation_id=new_id("put"), ttl_s=deadline.ttl_s(), wait_s=wait_s
    )
    for item in items:
        request.wishes.add(
            key=item.block.key,
            parent=item.block.parent or b"",
            length=item.length,
            tenant=terms.tenant,
            pin=pin_to_wire(terms.pin),
        )
    return request


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
