"""Registered memory for values: a pool of segments (`RegisteredScratch`), and places in a segment (`BufferSlots`).

Segments are kept between calls, because fresh pages cost more than the copy (0.9 against 12 GB/s). Knows no keys.
"""

import contextlib
import functools
import itertools
import operator
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import KvLayout, checksum
from moonserve.protocol.request import BlockId
from moonserve.transfer import Segment, TransferEngine
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import IoVectors, Words
from moonserve.transfer.memory.scatter import LENGTH, LOCAL, REMOTE, Rows

_SMALLEST = 64 * 1024
_KEPT_BYTES = 64 * 2**20


class RegisteredScratch:
    """Segments to borrow, each by one borrower at a time."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._idle: list[Segment] = []

    @contextlib.contextmanager
    def borrow(self, nbytes: int) -> Iterator[Segment]:
        """Lends at least `nbytes` of memory. No transfer may use it after the block."""
        segment = self._take(nbytes)
        if segment is None:
            segment = self._engine.allocate(max(_SMALLEST, 1 << (nbytes - 1).bit_length()))
        try:
            yield segment
        finally:
            self._give_back(segment)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for segment in idle:
            self._engine.deregister(segment)

    def _take(self, nbytes: int) -> Segment | None:
        with self._lock:
            fitting = (segment for segment in self._idle if segment.nbytes >= nbytes)
            smallest = min(fitting, key=lambda segment: segment.nbytes, default=None)
            if smallest is not None:
                self._idle.remove(smallest)
            return smallest

    def _give_back(self, segment: Segment) -> None:
        with self._lock:
            if sum(idle.nbytes for idle in self._idle) + segment.nbytes <= _KEPT_BYTES:
                self._idle.append(segment)
                return
        self._engine.deregister(segment)


PORTION_BYTES = 32 * 2**20
"""Scratch memory that a batch borrows at a time; larger segments would not be kept."""


@dataclass(frozen=True, slots=True, eq=False)
class BufferSlots:
    """Non-overlapping slots in a segment, each with an offset and a number of bytes.

    Shape (keys,), or (keys, pieces) where a value fills several pieces of memory, one after the other.
    """

    segment: Segment
    offsets: Words
    capacities: Words
    lengths: Words
    """Bytes of a value that fills each slot."""

    @classmethod
    def scattered(cls, segment: Segment, offsets: npt.ArrayLike, piece_bytes: int) -> "BufferSlots":
        """Returns slots made of equal pieces at `offsets` in the segment, of shape (keys, pieces)."""
        places = np.asarray(offsets, np.uint64)
        return cls.pages(segment, places, [piece_bytes] * places.shape[1])

    @classmethod
    def pages(cls, segment: Segment, offsets: npt.ArrayLike, page_bytes: Sequence[int]) -> "BufferSlots":
        """Returns slots made of pages at `offsets` (shape (keys, pages)), each page with its own size."""
        places = np.asarray(offsets, np.uint64).reshape(-1, len(page_bytes))
        sizes = np.array(page_bytes, np.uint64)
        rooms = np.broadcast_to(sizes, places.shape).copy()
        return cls(segment, places, rooms, np.full(len(places), sizes.sum(), np.uint64))

    @classmethod
    def checked(cls, segment: Segment, offsets: Sequence[int], rooms: Sequence[int] | None = None) -> "BufferSlots":
        """Returns validated slots. Without `rooms`, each ends where the next one begins, the last one with the segment.

        Raises InvalidRequest for slots that are not within the segment.
        """
        if rooms is None:
            rooms = capacities_between(offsets, segment.nbytes)
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
    def packed(cls, segment: Segment, lengths: Sequence[int]) -> "BufferSlots":
        """Returns slots back to back from the segment's beginning, which must have room for them."""
        rooms = np.array(lengths, np.uint64)
        return cls(segment, np.cumsum(rooms, dtype=np.uint64) - rooms, rooms, rooms)

    def at(self, places: Sequence[int]) -> "BufferSlots":
        """Returns the slots at the given places, in order."""
        if len(places) == len(self.offsets):
            return self
        some = list(places)
        return BufferSlots(self.segment, self.offsets[some], self.capacities[some], self.lengths[some])

    @property
    def addresses(self) -> Words:
        return self.offsets + np.uint64(self.segment.base)

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())

    def rows(self, remote_offsets: Sequence[int]) -> Rows:
        """Returns the rows that transfer whole values, each contiguous at its remote offset."""
        if self.capacities.ndim == 1:  # faster for few slots
            runs = zip(remote_offsets, self.offsets.tolist(), self.capacities.tolist(), strict=True)
            return scatter.rows(*runs)
        rooms = self.capacities.reshape(len(self.capacities), -1)
        rows: Rows = np.empty((*rooms.shape, 3), np.int64)
        rows[:, :, LOCAL] = self.offsets.reshape(rooms.shape)
        rows[:, :, LENGTH] = rooms
        rows[:, :, REMOTE] = rooms.cumsum(1) - rooms
        rows[:, :, REMOTE] += np.asarray(remote_offsets, np.int64)[:, None]
        return rows.reshape(-1, 3)

    def vectors(self) -> IoVectors:
        """Returns the memory of all slots, without empty pieces."""
        pieces = np.stack((self.addresses.ravel(), self.capacities.ravel()), axis=1)
        return pieces if pieces[:, 1].all() else pieces[pieces[:, 1] > 0]

    def pieces(self, place: int) -> list[memoryview]:
        """Returns the memory of a slot, piece by piece."""
        buffer = self.segment.buffer
        places = zip(
            np.atleast_1d(self.offsets[place]).tolist(),
            np.atleast_1d(self.capacities[place]).tolist(),
            strict=True,
        )
        return [buffer[offset : offset + nbytes] for offset, nbytes in places]

    def checksum(self, place: int) -> int:
        """Returns the checksum of the value that fills the slot."""
        return checksum(self.pieces(place))

    def memory(self, place: int, length: int) -> memoryview:
        """Returns the first bytes of a slot that has one piece."""
        offset = int(self.offsets[place])
        return self.segment.buffer[offset : offset + length]


def slots_of_blocks(segment: Segment, layout: KvLayout, num_blocks: int, blocks: Sequence[BlockId]) -> BufferSlots:
    """Returns the slots of blocks in a worker's pool: all pieces of each, in the order of a stored object."""
    nbytes = layout.piece_bytes
    first = np.array(blocks, np.uint64).reshape(-1, 1) * np.uint64(nbytes)
    return BufferSlots.scattered(segment, first + _pieces_of(layout, num_blocks), nbytes)


@functools.lru_cache(maxsize=64)
def _pieces_of(layout: KvLayout, num_blocks: int) -> Words:
    """Returns the offsets of block 0's pieces."""
    pieces = np.arange(layout.pieces_per_block, dtype=np.uint64)
    return pieces * np.uint64(num_blocks * layout.piece_bytes)


def _words(numbers: Sequence[int]) -> Words:
    """Returns an array at half the cost of `np.array`. Raises OverflowError for a negative number."""
    return np.frombuffer(array("Q", numbers), np.uint64)


def _outside(segment: Segment, offsets: Sequence[int], rooms: Sequence[int]) -> InvalidRequest:
    """Returns the error for the first slot outside the segment; there must be one."""
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


def capacities_between(offsets: Sequence[int], nbytes: int) -> list[int]:
    """Returns the bytes from each offset to the next one, or to the end."""
    ends = sorted({*offsets, nbytes})
    following = dict(itertools.pairwise(ends))
    return [following.get(offset, -1) - offset for offset in offsets]
