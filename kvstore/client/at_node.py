"""Reads objects of one node by the fastest available way: mapped memory, one-sided reads, or the node's help.

The node is asked only for objects that cannot be read without it. Returns a `Fate` for every object that is not read;
raises PeerLost or DeadlineExceeded if the node does not answer. Knows no other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.client.deadline import Deadline
from kvstore.client.express import GET_BYTES, GET_KEYS
from kvstore.client.far import Far
from kvstore.client.near import Near
from kvstore.client.node import Attachment, Means, StoreNode
from kvstore.client.node_lease import each_run, read_into
from kvstore.client.objects import Fate, LeasedObject
from kvstore.client.reports import Counters, Event, Touches
from kvstore.client.spots import Spots, portions
from kvstore.native.base import Entry
from protocol.keys import BlockKey, pack_keys
from protocol.pb import kvstore_pb2

T = TypeVar("T")
Keys = Sequence[BlockKey]
ReadInto = Callable[[slice, Spots], Sequence[int | Fate]]
"""Reads a slice of a batch into the given spots."""


class AtNode:
    """Thread-safe reads at the node given with each call."""

    def __init__(self, means: Means, touches: Touches, counters: Counters) -> None:
        self._means = means
        self._touches = touches
        self._counters = counters

    def values(self, node: StoreNode, keys: Keys, deadline: Deadline, *, verify: bool) -> list[bytes | Fate]:
        return self._read(
            node,
            keys,
            lambda near: near.values(keys, verify=verify),
            lambda far: self._far_values(far, keys, deadline),
            lambda some: self._leased_values(node, pick(keys, some), deadline, verify=verify),
            deadline,
        )

    def into(self, node: StoreNode, keys: Keys, spots: Spots, deadline: Deadline, *, verify: bool) -> list[int | Fate]:
        """Reads objects into their spots and returns the lengths. Raises InvalidRequest if an object does not fit."""
        return self._read(
            node,
            keys,
            lambda near: near.into(pack_keys(keys), spots, verify=verify),
            lambda far: far.fetch(keys, spots, deadline),
            lambda some: self._leased_into(node, pick(keys, some), spots.at(some), deadline, verify=verify),
            deadline,
        )

    def scatter(self, node: StoreNode, keys: Keys, spots: Spots, deadline: Deadline) -> list[int | Fate]:
        """Reads objects into spots of several pieces and returns their checksums. Objects with Fate.ASK are not read.

        Raises InvalidRequest for an object of another length.
        """
        fates: list[int | Fate] = _by(
            node,
            lambda near: near.scatter(keys, spots),
            lambda far: far.scatter(keys, spots, self._means.scratch, deadline),
            deadline,
        )
        self.used(node, used(keys, fates))
        return fates

    def exist(self, node: StoreNode, keys: Keys, deadline: Deadline) -> list[bool | Fate]:
        """Returns True or ABSENT for each key."""
        fates: list[bool | Fate] = _by(
            node, lambda near: near.exist(keys), lambda far: far.exist(keys, deadline), deadline
        )
        # an empty report: only reports notice the death of a mapped node
        if node.is_near:
            self.used(node, b"")
        if places := _to_ask(fates):
            request = kvstore_pb2.StoreExistsRequest(keys=pick(keys, places))
            reply = node.call(lambda stub: stub.Exists, request, deadline)
            _put(fates, places, reply.present)
        return [fate if fate is True else Fate.ABSENT for fate in fates]

    def entries(self, node: StoreNode, keys: Keys, deadline: Deadline) -> list[Entry | LeasedObject | Fate]:
        """Returns the entries of the objects without reading them."""
        fates: list[Entry | LeasedObject | Fate] = [
            *_by(
                node,
                lambda near: [near.find(key) for key in keys],
                lambda far: far.look(keys, deadline),
                deadline,
            )
        ]
        places = _to_ask(fates)
        for first, lease in each_run(node, pick(keys, places), deadline):
            for place, entry in zip(places[first:], lease.entries, strict=False):
                fates[place] = entry
        return [Fate.ABSENT if fate is Fate.ASK else fate for fate in fates]

    def used(self, node: StoreNode, packed_keys: bytes) -> None:
        """Reports that these keys were read without the node's help."""
        self._touches.note(node, packed_keys)

    def _read(
        self,
        node: StoreNode,
        keys: Keys,
        near: Callable[[Near], list[T | Fate]],
        far: Callable[[Far], list[T | Fate]],
        leased: Callable[[Sequence[int]], list[T | Fate]],
        deadline: Deadline,
    ) -> list[T | Fate]:
        fates = _by(node, near, far, deadline)
        if Fate not in set(map(type, fates)):
            self.used(node, pack_keys(keys))
            return fates
        self.used(node, used(keys, fates))
        if places := _to_ask(fates):
            _put(fates, places, leased(places))
            self._counters.count(Event.LEASED_READ, len(places))
        return fates

    def _far_values(self, far: Far, keys: Keys, deadline: Deadline) -> list[bytes | Fate]:
        """Returns the values sent with the node's answer, and READs the others."""
        if len(keys) > GET_KEYS:
            first = self._far_values(far, keys[:GET_KEYS], deadline)
            return first + self._far_values(far, keys[GET_KEYS:], deadline)
        fates: list[bytes | Fate] = [Fate.ABSENT] * len(keys)
        with self._means.scratch.borrow(GET_BYTES) as local:
            found, spots = far.look_or_read(keys, local, deadline)
            for place, each in enumerate(found):
                if isinstance(each, int):
                    fates[place] = bytes(spots.memory(place, each))
                elif isinstance(each, Fate):
                    fates[place] = each
        places = [place for place, each in enumerate(found) if isinstance(each, Entry)]
        entries = [each for each in found if isinstance(each, Entry)]

        def read(part: slice, spots: Spots) -> list[int | Fate]:
            return far.into(entries[part], spots, deadline)

        _put(fates, places, self._through_scratch([entry.length for entry in entries], read))
        return fates

    def _leased_values(self, node: StoreNode, keys: Keys, deadline: Deadline, *, verify: bool) -> list[bytes | Fate]:
        fates: list[bytes | Fate] = [Fate.ABSENT] * len(keys)
        for first, lease in each_run(node, keys, deadline):

            def read(part: slice, spots: Spots) -> list[int | Fate]:
                engine = self._means.engine
                return read_into(engine, lease, part, spots, verify=verify, deadline=deadline)  # noqa: B023

            lengths = [entry.length for entry in lease.entries]
            values = self._through_scratch(lengths, read)
            fates[first : first + len(values)] = values
        return fates

    def _leased_into(
        self, node: StoreNode, keys: Keys, spots: Spots, deadline: Deadline, *, verify: bool
    ) -> list[int | Fate]:
        fates: list[int | Fate] = [Fate.ABSENT] * len(keys)
        for first, lease in each_run(node, keys, deadline):
            last = first + len(lease.entries)
            there = spots.at(range(first, last))
            fates[first:last] = read_into(
                self._means.engine, lease, slice(None), there, verify=verify, deadline=deadline
            )
        return fates

    def _through_scratch(self, lengths: Sequence[int], read: ReadInto) -> list[bytes | Fate]:
        """Reads values for which the caller has no memory, through scratch memory."""
        values: list[bytes | Fate] = []
        for part in portions(lengths):
            some = lengths[part]
            with self._means.scratch.borrow(sum(some) or 1) as local:
                spots = Spots.packed(local, some)
                values += [
                    fate if isinstance(fate, Fate) else bytes(spots.memory(place, fate))
                    for place, fate in enumerate(read(part, spots))
                ]
        return values


def used(keys: Keys, fates: Sequence[object]) -> bytes:
    """Returns the keys that were read, back to back."""
    if Fate not in set(map(type, fates)):  # faster than a Python loop
        return pack_keys(keys)
    return pack_keys([k for k, fate in zip(keys, fates, strict=True) if not isinstance(fate, Fate)])


def pick(items: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    return items if len(places) == len(items) else [items[place] for place in places]


def _by(
    node: StoreNode,
    near: Callable[[Near], list[T | Fate]],
    far: Callable[[Far], list[T | Fate]],
    deadline: Deadline,
) -> list[T | Fate]:
    """Reads through mapped memory if there is any, else remotely."""

    def read(way: Attachment) -> list[T | Fate]:
        if way.near is not None:
            return near(way.near)
        assert way.far is not None
        return far(way.far)

    return node.reading(read, deadline)


def _to_ask(fates: Sequence[object]) -> list[int]:
    return [place for place, fate in enumerate(fates) if fate is Fate.ASK]


def _put(into: list[T | Fate], places: Sequence[int], fates: Sequence[T | Fate]) -> None:
    for place, fate in zip(places, fates, strict=True):
        into[place] = fate
