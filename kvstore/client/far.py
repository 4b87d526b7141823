"""One-sided reads of a node on another host: a piece of its index, the bytes, and the piece again where that matters.

Its rule: what is given was committed and is whole. Bytes count when they match their checksum or, without that, when
their entry is the same after they were read; a mismatch is CORRUPT only when the entry is still the same in an index
that is still in use. Every method raises Retired when the index has moved, PeerLost when the node does not answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvstore.client.deadline import Deadline
from kvstore.client.fate import Fate, too_small
from kvstore.client.index_run import Found, look, unchanged
from kvstore.client.near import require_within
from kvstore.client.scratch import Scratch
from kvstore.client.spots import Spots
from kvstore.native.layout import HEADER, Geometry, Retired
from kvstore.native.reader import slots_of
from protocol.errors import InvalidRequest
from protocol.keys import BlockKey
from transfer import Op, RemoteSegment, ScatterTransfer, Segment, Transfer, TransferEngine, scatter

Run = tuple[int, int, int]
"""Remote offset, local offset, length."""
_HEADER_RUN = (0, 0, HEADER.size)


class Far:
    """May be used by several threads."""

    def __init__(
        self,
        engine: TransferEngine,
        scratch: Scratch,
        index: RemoteSegment,
        index_bytes: int,
        data: RemoteSegment,
        deadline: Deadline,
    ) -> None:
        """Reads how the index is laid out."""
        self._engine = engine
        self._scratch = scratch
        self._index = index
        self._data = data
        self._index_bytes = index_bytes
        with scratch.borrow(HEADER.size) as local:
            self._read(index, local, [_HEADER_RUN], deadline)
            self._geometry = Geometry.parse(local.buffer[: HEADER.size], index_bytes)

    def look(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Found | Fate]:
        """What the index says of each; ABSENT is a hint here."""
        looks = self._look(keys, deadline)
        return [look(run, key) for run, key in zip(looks, keys, strict=True)]

    def into(
        self,
        keys: Sequence[BlockKey],
        found: Sequence[Found],
        spots: Spots,
        *,
        verify: bool,
        deadline: Deadline,
    ) -> list[int | Fate]:
        """Reads each object, of which `found` tells, into its spot. Raises InvalidRequest for one that does not fit."""
        runs = [
            self._object_run(each, spots, place)
            for place, each in enumerate(found)
            if each.entry.offset is not None
        ]
        deadline.allow(sum(nbytes for _, _, nbytes in runs))
        read(self._engine, self._data, spots.segment, runs, deadline)
        fates: list[int | Fate] = [
            Fate.ASK if each.entry.offset is None else each.entry.length for each in found
        ]
        doubtful = [
            place
            for place, fate in enumerate(fates)
            if not isinstance(fate, Fate) and not (verify and _matches(found[place], spots, place))
        ]
        if doubtful:
            still = self._unchanged(keys, found, doubtful, deadline)
            for place, same in zip(doubtful, still, strict=True):
                if verify or not same:
                    fates[place] = Fate.CORRUPT if same else Fate.ASK
        return fates

    def part(self, key: BlockKey, offset: int, length: int, deadline: Deadline) -> bytes | Fate:
        """Bytes from the midst of an object. On the wire only transfers' own checksums guard them.

        Raises InvalidRequest: out of bounds.
        """
        [found] = self.look([key], deadline)
        if isinstance(found, Fate) or found.entry.offset is None:
            return Fate.ASK
        require_within(found.entry, offset, length)
        deadline.allow(length)
        with self._scratch.borrow(length or 1) as local:
            read(
                self._engine,
                self._data,
                local,
                [(found.entry.offset + offset, 0, length)],
                deadline,
            )
            [same] = self._unchanged([key], [found], [0], deadline)
            return bytes(local.buffer[:length]) if same else Fate.ASK

    def _unchanged(
        self,
        keys: Sequence[BlockKey],
        found: Sequence[Found],
        places: Sequence[int],
        deadline: Deadline,
    ) -> list[bool]:
        """Whether the entries of these places are as they were."""
        some = [keys[place] for place in places]
        return [
            unchanged(found[place], run, key)
            for place, run, key in zip(places, self._look(some, deadline), some, strict=True)
        ]

    def _look(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[bytes]:
        """The slots of each key in an index that was in use when they were read. Raises Retired.

        Whether its header is read before or after them does not matter: an index that is retired between is not
        changed any more, so the slots say what was true at that moment.
        """
        runs = [_HEADER_RUN]
        at = HEADER.size
        for key in keys:
            offset, nbytes = slots_of(self._geometry, key)
            runs.append((offset, at, nbytes))
            at += nbytes
        with self._scratch.borrow(at) as local:
            self._read(self._index, local, runs, deadline)
            Geometry.parse(local.buffer[: HEADER.size], self._index_bytes)
            return [bytes(local.buffer[at : at + nbytes]) for _, at, nbytes in runs[1:]]

    def _object_run(self, found: Found, spots: Spots, place: int) -> Run:
        entry = found.entry
        if entry.length > spots.rooms[place]:
            raise too_small(entry.length, int(spots.rooms[place]))
        assert entry.offset is not None
        return entry.offset, int(spots.offsets[place]), entry.length

    def _read(
        self, index: RemoteSegment, local: Segment, runs: Sequence[Run], deadline: Deadline
    ) -> None:
        try:
            read(self._engine, index, local, runs, deadline)
        except InvalidRequest as error:  # it was given back some time after it had moved
            raise Retired from error


def read(
    engine: TransferEngine,
    remote: RemoteSegment,
    local: Segment,
    runs: Sequence[Run],
    deadline: Deadline,
) -> None:
    """One READ, in the caller's thread where that is quicker. On return or error no byte of it moves any more."""
    runs = [run for run in runs if run[2]]
    if not runs:
        return
    if len(runs) == 1:  # the engine has a shorter way for a single one
        [(offset, at, nbytes)] = runs
        single = Transfer(Op.READ, local, at, remote, offset, nbytes)
        engine.run([single], deadline_s=deadline.left_s())
    else:
        rows = scatter.rows(*runs)
        engine.run([ScatterTransfer(Op.READ, local, remote, rows)], deadline_s=deadline.left_s())


def _matches(found: Found, spots: Spots, place: int) -> bool:
    memory = spots.memory(place, found.entry.length)
    return xxhash.xxh3_64_intdigest(memory) == found.entry.checksum
