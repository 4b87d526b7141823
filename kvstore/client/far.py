"""Reads from a node whose memory cannot be mapped: the node says where objects lie, and READs fetch their bytes.

Small objects come with the answer if the node offers express. Only bytes that match the checksum count, since nothing
keeps an object in place between the answer and the READ. An object that does not match is left to a lease, under which
a mismatch means corruption. The call for the places costs a fifth of a READ of the index over TCP. PeerLost and
DeadlineExceeded pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import xxhash

from kvstore.client.deadline import Deadline
from kvstore.client.express import GET_BYTES, GET_KEYS, Express, Found, NotOffered
from kvstore.client.objects import Fate, LeasedObject, too_small
from kvstore.client.scratch import Scratch
from kvstore.client.spots import Spots
from kvstore.native.base import Entry
from protocol.keys import BlockKey
from transfer import Op, RemoteSegment, ScatterTransfer, Segment, Transfer, TransferEngine, scatter

T = TypeVar("T")
Run = tuple[int, int, int]
"""Remote offset, local offset, length."""
Find = Callable[[Sequence[BlockKey], Deadline], Sequence[Entry | None]]


class Far:
    """Thread-safe remote reader of one node."""

    def __init__(
        self,
        engine: TransferEngine,
        find: Find,
        data: RemoteSegment,
        express: Express | None = None,
    ) -> None:
        self._engine = engine
        self._find = find
        self._data = data
        self._express = express

    def exist(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[bool | Fate]:
        """Tells which keys exist; ASK if express cannot tell."""
        found = None
        if len(keys) <= GET_KEYS:
            found = self._express_get(lambda express: express.exist(keys, deadline))
        return [Fate.ASK] * len(keys) if found is None else found

    def look(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Entry | Fate]:
        """Returns the node's entry for each key."""
        return [entry or Fate.ABSENT for entry in self._find(keys, deadline)]

    def fetch(self, keys: Sequence[BlockKey], spots: Spots, deadline: Deadline) -> list[int | Fate]:
        """Reads each object into its spot, by express if offered. Raises InvalidRequest if an object does not fit."""
        if len(keys) > GET_KEYS:
            rest = spots.at(range(GET_KEYS, len(keys)))
            return [
                *self.fetch(keys[:GET_KEYS], spots.at(range(GET_KEYS)), deadline),
                *self.fetch(keys[GET_KEYS:], rest, deadline),
            ]
        found = self._express_get(lambda express: express.get(keys, spots, deadline))
        if found is None:
            found = list(self.look(keys, deadline))
        if Entry not in set(map(type, found)):  # faster than a Python loop
            return cast("list[int | Fate]", found)
        fates = [Fate.ASK if isinstance(each, Entry) else each for each in found]
        places = [place for place, each in enumerate(found) if isinstance(each, Entry)]
        if places:
            entries = [each for each in found if isinstance(each, Entry)]
            read = self.into(entries, spots.at(places), deadline)
            for place, fate in zip(places, read, strict=True):
                fates[place] = fate
        return fates

    def scatter(self, keys: Sequence[BlockKey], spots: Spots, scratch: Scratch, deadline: Deadline) -> list[int | Fate]:
        """Reads objects into spots of several pieces and returns their checksums; ASK for all that express cannot read.

        Raises InvalidRequest for an object of another length.
        """
        found = None
        if spots.nbytes <= GET_BYTES and len(keys) <= GET_KEYS:
            with scratch.borrow(spots.nbytes or 1) as local:
                found = self._express_get(lambda express: express.scatter(keys, spots, local, deadline))
        return [Fate.ASK] * len(keys) if found is None else found

    async def scatter_in_loop(
        self, keys: Sequence[BlockKey], spots: Spots, scratch: Scratch, deadline: Deadline
    ) -> list[int | Fate] | None:
        """Does the same as `scatter` in an event loop. Returns None if that needs a thread."""
        if self._express is None or spots.nbytes > GET_BYTES or len(keys) > GET_KEYS:
            return None
        with scratch.borrow(spots.nbytes or 1) as local:
            return await self._express.scatter_in_loop(keys, spots, local, deadline)

    def look_or_read(
        self, keys: Sequence[BlockKey], local: Segment, deadline: Deadline
    ) -> tuple[Sequence[Found], Spots]:
        """Reads the values sent with the answer into `local`, which has room for `GET_BYTES`; locates the others."""
        got = self._express_get(lambda express: express.get_packed(keys, local, deadline))
        return got or (self.look(keys, deadline), Spots.packed(local, [0] * len(keys)))

    def _express_get(self, get: Callable[[Express], T]) -> T | None:
        """Runs `get`. Returns None if express is not offered."""
        if self._express is not None:
            try:
                return get(self._express)
            except NotOffered:
                self._express = None
        return None

    def into(self, entries: Sequence[Entry], spots: Spots, deadline: Deadline) -> list[int | Fate]:
        """READs each object into its spot. Raises InvalidRequest for an object that does not fit."""
        runs = [
            (entry.offset, int(spots.offsets[place]), _fitting(entry, spots, place))
            for place, entry in enumerate(entries)
            if entry.offset is not None
        ]
        deadline.allow(sum(nbytes for _, _, nbytes in runs))
        read(self._engine, self._data, spots.segment, runs, deadline)
        return [
            entry.length if entry.offset is not None and matches(entry, spots, place) else Fate.ASK
            for place, entry in enumerate(entries)
        ]


def _fitting(entry: Entry, spots: Spots, place: int) -> int:
    if entry.length > spots.rooms[place]:
        raise too_small(entry.length, int(spots.rooms[place]))
    return entry.length


def read(
    engine: TransferEngine,
    remote: RemoteSegment,
    local: Segment,
    runs: Sequence[Run],
    deadline: Deadline,
) -> None:
    """READs the runs as one batch, in the caller's thread if faster. When it ends, no byte of it moves any more."""
    runs = [run for run in runs if run[2]]
    if not runs:
        return
    if len(runs) == 1:  # the engine has a fast path for a single transfer
        [(offset, at, nbytes)] = runs
        single = Transfer(Op.READ, local, at, remote, offset, nbytes)
        engine.run([single], deadline_s=deadline.left_s())
    else:
        rows = scatter.rows(*runs)
        engine.run([ScatterTransfer(Op.READ, local, remote, rows)], deadline_s=deadline.left_s())


def matches(entry: Entry | LeasedObject, spots: Spots, place: int) -> bool:
    return xxhash.xxh3_64_intdigest(spots.memory(place, entry.length)) == entry.checksum
