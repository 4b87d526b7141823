"""Reading objects of one node by the quickest way that can be had: mapped, one-sided, or with the node's help.

Its rule: the node is asked only about what could not be read without it. Gives a `Fate` for every object that is not
read; raises PeerLost or DeadlineExceeded when the node does not answer. Knows no other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TypeVar

from kvstore.client.counters import Counters, Event
from kvstore.client.deadline import Deadline
from kvstore.client.express import GET_BYTES
from kvstore.client.far import Far
from kvstore.client.fate import Fate
from kvstore.client.leased import each_run, read_into, read_part, take_lease
from kvstore.client.near import Near
from kvstore.client.node import Attachment, Means, StoreNode
from kvstore.client.scratch import PORTION_BYTES
from kvstore.client.spots import Spots
from kvstore.client.touches import Touches
from kvstore.native.base import Entry
from protocol.keys import BlockKey, pack_keys
from protocol.pb import kvstore_pb2

T = TypeVar("T")
Keys = Sequence[BlockKey]
ReadInto = Callable[[slice, Spots], Sequence[int | Fate]]
"""Reads a part of a batch into spots of its own."""


class AtNode:
    """Thread-safe; for any node that is given."""

    def __init__(self, means: Means, touches: Touches, counters: Counters) -> None:
        self._means = means
        self._touches = touches
        self._counters = counters

    def values(
        self, node: StoreNode, keys: Keys, deadline: Deadline, *, verify: bool
    ) -> list[bytes | Fate]:
        def near(near: Near) -> list[bytes | Fate]:
            return near.values(keys, verify=verify)

        def far(far: Far) -> list[bytes | Fate]:
            return self._far_values(far, keys, deadline)

        def leased(places: Sequence[int]) -> list[bytes | Fate]:
            return self._leased_values(node, pick(keys, places), deadline, verify=verify)

        return self._read(node, keys, near, far, leased, deadline)

    def into(
        self, node: StoreNode, keys: Keys, spots: Spots, deadline: Deadline, *, verify: bool
    ) -> list[int | Fate]:
        """Lengths of what lies in the spots now. Raises InvalidRequest for an object that does not fit."""

        def near(near: Near) -> list[int | Fate]:
            return near.into(pack_keys(keys), spots, verify=verify)

        def far(far: Far) -> list[int | Fate]:
            return far.fetch(keys, spots, deadline)

        def leased(places: Sequence[int]) -> list[int | Fate]:
            there = spots.at(places)
            return self._leased_into(node, pick(keys, places), there, deadline, verify=verify)

        return self._read(node, keys, near, far, leased, deadline)

    def part(
        self, node: StoreNode, key: BlockKey, offset: int, length: int, deadline: Deadline
    ) -> bytes | Fate:
        """Raises InvalidRequest when it is not within the object."""

        def near(near: Near) -> list[bytes | Fate]:
            return [near.part(key, offset, length)]

        def far(_: Far) -> list[bytes | Fate]:
            return [Fate.ASK]  # a part cannot be verified, so a lease has to keep it in its place

        def leased(_: Sequence[int]) -> list[bytes | Fate]:
            return [self._leased_part(node, key, offset, length, deadline)]

        [fate] = self._read(node, [key], near, far, leased, deadline)
        return fate

    def exist(self, node: StoreNode, keys: Keys, deadline: Deadline) -> list[bool | Fate]:
        """True or ABSENT."""

        def near(near: Near) -> list[bool | Fate]:
            self.used(node, b"")
            return near.exist(keys)

        def far(far: Far) -> list[bool | Fate]:
            return far.exist(keys, deadline)

        fates = node.reading(lambda way: _by(way, near, far), deadline)
        if places := _to_ask(fates):
            request = kvstore_pb2.StoreExistsRequest(keys=pick(keys, places))
            reply = node.call(lambda stub: stub.Exists, request, deadline)
            _put(fates, places, reply.present)
        return [fate if fate is True else Fate.ABSENT for fate in fates]

    def entries(self, node: StoreNode, keys: Keys, deadline: Deadline) -> list[Entry | Fate]:
        """What the node says of them, without reading them."""

        def near(near: Near) -> list[Entry | Fate]:
            return [near.find(key) for key in keys]

        def far(far: Far) -> list[Entry | Fate]:
            return far.look(keys, deadline)

        fates = node.reading(lambda way: _by(way, near, far), deadline)
        places = _to_ask(fates)
        for first, lease in each_run(node, pick(keys, places), deadline):
            _put(fates, places[first : first + len(lease.entries)], lease.entries)
        return [Fate.ABSENT if fate is Fate.ASK else fate for fate in fates]

    def used(self, node: StoreNode, packed_keys: bytes) -> None:
        """They were read there without the node's help."""
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
        fates = node.reading(lambda way: _by(way, near, far), deadline)
        if Fate not in set(map(type, fates)):
            self.used(node, pack_keys(keys))
            return fates
        read = [key for key, fate in zip(keys, fates, strict=True) if not isinstance(fate, Fate)]
        self.used(node, pack_keys(read))
        if len(read) < len(keys) and (places := _to_ask(fates)):
            _put(fates, places, leased(places))
            self._counters.count(Event.LEASED_READ, len(places))
        return fates

    def _far_values(self, far: Far, keys: Keys, deadline: Deadline) -> list[bytes | Fate]:
        """What came along with the answer, and what is then read."""
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

    def _leased_values(
        self, node: StoreNode, keys: Keys, deadline: Deadline, *, verify: bool
    ) -> list[bytes | Fate]:
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

    def _leased_part(
        self, node: StoreNode, key: BlockKey, offset: int, length: int, deadline: Deadline
    ) -> bytes | Fate:
        with closing(take_lease(node, [key], deadline)) as lease:
            if not lease.entries:
                return Fate.ABSENT
            with self._means.guarded.borrow(length or 1) as (engine, local):
                read_part(engine, lease, local, offset, length, deadline)
                return bytes(local.buffer[:length])

    def _through_scratch(self, lengths: Sequence[int], read: ReadInto) -> list[bytes | Fate]:
        """Values for which the caller has no memory."""
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


def portions(lengths: Sequence[int], limit: int = PORTION_BYTES) -> Iterator[slice]:
    """Parts of a batch of at most `limit` bytes each, or of one object that has more."""
    first = nbytes = 0
    for place, length in enumerate(lengths):
        if place > first and nbytes + length > limit:
            yield slice(first, place)
            first, nbytes = place, 0
        nbytes += length
    if first < len(lengths):
        yield slice(first, len(lengths))


def pick(items: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    return items if len(places) == len(items) else [items[place] for place in places]


def _by(
    way: Attachment,
    near: Callable[[Near], list[T | Fate]],
    far: Callable[[Far], list[T | Fate]],
) -> list[T | Fate]:
    if way.near is not None:
        return near(way.near)
    assert way.far is not None
    return far(way.far)


def _to_ask(fates: Sequence[object]) -> list[int]:
    return [place for place, fate in enumerate(fates) if fate is Fate.ASK]


def _put(into: list[T | Fate], places: Sequence[int], fates: Sequence[T | Fate]) -> None:
    for place, fate in zip(places, fates, strict=True):
        into[place] = fate
