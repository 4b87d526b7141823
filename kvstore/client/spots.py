"""Places of values in registered memory: one spot per key, in one piece or in several. Pure."""

from __future__ import annotations

import functools
import itertools
import operator
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.checksum import checksum
from protocol.errors import InvalidRequest
from protocol.ids import BlockId
from protocol.layout import KvLayout
from transfer import Segment, scatter
from transfer.native import IoVectors
from transfer.scatter import LENGTH, LOCAL, REMOTE, Rows

PORTION_BYTES = 32 * 2**20
"""Scratch memory that a batch borrows at a time; larger segments would not be kept."""
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Spots:
    """Non-overlapping spots in a segment, each with an offset and a number of bytes.

    Shape (keys,), or (keys, pieces) where a value fills several pieces of memory, one after the other.
    """

    segment: Segment
    offsets: Words
    rooms: Words
    lengths: Words
    """Bytes of a value that fills each spot."""

    @classmethod
    def scattered(cls, segment: Segment, offsets: npt.ArrayLike, piece_bytes: int) -> Spots:
        """Returns spots made of equal pieces at `offsets` in the segment, of shape (keys, pieces)."""
        places = np.asarray(offsets, np.uint64)
        count, pieces = places.shape
        rooms = np.full((count, pieces), piece_bytes, np.uint64)
        return cls(segment, places, rooms, np.full(count, pieces * piece_bytes, np.uint64))

    @classmethod
    def checked(cls, segment: Segment, offsets: Sequence[int], rooms: Sequence[int] | None = None) -> Spots:
        """Returns validated spots. Without `rooms`, each ends where the next one begins, the last one with the segment.

        Raises InvalidRequest for spots that are not within the segment.
        """
        if rooms is None:
            rooms = rooms_between(offsets, segment.nbytes)
        if len(rooms) != len(offsets):
            raise InvalidRequest(f"{len(offsets)} offsets with {len(rooms)} lengths")
        if max(map(operator.add, offsets, rooms), default=0) > segment.nbytes:
            raise _outside(segment, offsets, rooms)
        try:
            words = _words(rooms)
            return cls(segment, _words(offsets), words, words)
        except OverflowError as error:  # a negative number
            raise _outside(segment, offsets, rooms) from error

    @classmethod
    def packed(cls, segment: Segment, lengths: Sequence[int]) -> Spots:
        """Returns spots back to back from the segment's beginning, which must have room for them."""
        rooms = np.array(lengths, np.uint64)
        return cls(segment, np.cumsum(rooms, dtype=np.uint64) - rooms, rooms, rooms)

    def at(self, places: Sequence[int]) -> Spots:
        """Returns the spots at the given places, in order."""
        if len(places) == len(self.offsets):
            return self
        some = list(places)
        return Spots(self.segment, self.offsets[some], self.rooms[some], self.lengths[some])

    @property
    def addresses(self) -> Words:
        return self.offsets + np.uint64(self.segment.base)

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())

    def rows(self, remote_offsets: Sequence[int]) -> Rows:
        """Returns the rows that transfer whole values, each contiguous at its remote offset."""
        if self.rooms.ndim == 1:  # faster for few spots
            runs = zip(remote_offsets, self.offsets.tolist(), self.rooms.tolist(), strict=True)
            return scatter.rows(*runs)
        rooms = self.rooms.reshape(len(self.rooms), -1)
        rows: Rows = np.empty((*rooms.shape, 3), np.int64)
        rows[:, :, LOCAL] = self.offsets.reshape(rooms.shape)
        rows[:, :, LENGTH] = rooms
        rows[:, :, REMOTE] = rooms.cumsum(1) - rooms
        rows[:, :, REMOTE] += np.asarray(remote_offsets, np.int64)[:, None]
        return rows.reshape(-1, 3)

    def vectors(self) -> IoVectors:
        """Returns the memory of all spots, without empty pieces."""
        pieces = np.stack((self.addresses.ravel(), self.rooms.ravel()), axis=1)
        return pieces if pieces[:, 1].all() else pieces[pieces[:, 1] > 0]

    def checksum(self, place: int) -> int:
        """Returns the checksum of the value that fills the spot."""
        buffer = self.segment.buffer
        pieces = zip(
            np.atleast_1d(self.offsets[place]).tolist(),
            np.atleast_1d(self.rooms[place]).tolist(),
            strict=True,
        )
        return checksum(buffer[offset : offset + nbytes] for offset, nbytes in pieces)

    def memory(self, place: int, length: int) -> memoryview:
        """Returns the first bytes of a spot that has one piece."""
        offset = int(self.offsets[place])
        return self.segment.buffer[offset : offset + length]


def spots_of(segment: Segment, layout: KvLayout, num_blocks: int, blocks: Sequence[BlockId]) -> Spots:
    """Returns the spots of blocks in a worker's pool: all pieces of each, in the order of a stored object."""
    nbytes = layout.piece_bytes
    first = np.array(blocks, np.uint64).reshape(-1, 1) * np.uint64(nbytes)
    return Spots.scattered(segment, first + _pieces_of(layout, num_blocks), nbytes)


@functools.lru_cache(maxsize=64)
def _pieces_of(layout: KvLayout, num_blocks: int) -> Words:
    """Returns the offsets of block 0's pieces."""
    pieces = np.arange(layout.pieces_per_block, dtype=np.uint64)
    return pieces * np.uint64(num_blocks * layout.piece_bytes)


def _words(numbers: Sequence[int]) -> Words:
    """Returns an array at half the cost of `np.array`. Raises OverflowError for a negative number."""
    return np.frombuffer(array("Q", numbers), np.uint64)


def _outside(segment: Segment, offsets: Sequence[int], rooms: Sequence[int]) -> InvalidRequest:
    """Returns the error for the first spot outside the segment; there must be one."""
    offset, room = next(
        (offset, room)
        for offset, room in zip(offsets, rooms, strict=True)
        if offset < 0 or room < 0 or offset + room > segment.nbytes
    )
    return InvalidRequest(f"{room} bytes at {offset} are not within a segment of {segment.nbytes} bytes")


def portions(lengths: Sequence[int], limit: int = PORTION_BYTES) -> Iterator[slice]:
    """Yields slices of a batch, of at most `limit` bytes each or of one larger object."""
    first = nbytes = 0
    for place, length in enumerate(lengths):
        if place > first and nbytes + length > limit:
            yield slice(first, place)
            first, nbytes = place, 0
        nbytes += length
    if first < len(lengths):
        yield slice(first, len(lengths))


def rooms_between(offsets: Sequence[int], nbytes: int) -> list[int]:
    """Returns the bytes from each offset to the next one, or to the end."""
    ends = sorted({*offsets, nbytes})
    following = dict(itertools.pairwise(ends))
    return [following.get(offset, -1) - offset for offset in offsets]
