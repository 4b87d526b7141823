"""Where values are to lie in registered memory: one spot per key. Pure."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protocol.errors import InvalidRequest
from transfer import Segment

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Spots:
    """Each has an offset in the segment, and room for so many bytes. They do not overlap."""

    segment: Segment
    offsets: Words
    rooms: Words

    @classmethod
    def checked(
        cls, segment: Segment, offsets: Sequence[int], rooms: Sequence[int] | None = None
    ) -> Spots:
        """Without `rooms`, each spot ends where the next one begins, the last one with the segment.

        Raises InvalidRequest for spots that are not within the segment.
        """
        if rooms is None:
            rooms = rooms_between(offsets, segment.nbytes)
        if len(rooms) != len(offsets):
            raise InvalidRequest(f"{len(offsets)} offsets with {len(rooms)} lengths")
        if max(map(operator.add, offsets, rooms), default=0) > segment.nbytes:
            raise _outside(segment, offsets, rooms)
        try:
            return cls(segment, _words(offsets), _words(rooms))
        except OverflowError as error:  # below 0
            raise _outside(segment, offsets, rooms) from error

    @classmethod
    def packed(cls, segment: Segment, lengths: Sequence[int]) -> Spots:
        """Back to back from the beginning; there is room."""
        rooms = np.array(lengths, np.uint64)
        return cls(segment, np.cumsum(rooms, dtype=np.uint64) - rooms, rooms)

    def at(self, places: Sequence[int]) -> Spots:
        """Some of them, in order."""
        if len(places) == len(self.offsets):
            return self
        return Spots(self.segment, self.offsets[list(places)], self.rooms[list(places)])

    @property
    def addresses(self) -> Words:
        return self.offsets + np.uint64(self.segment.base)

    def memory(self, place: int, length: int) -> memoryview:
        """The first bytes of a spot."""
        offset = int(self.offsets[place])
        return self.segment.buffer[offset : offset + length]


def _words(numbers: Sequence[int]) -> Words:
    """Half the price of `np.array`. Raises OverflowError for one below 0."""
    return np.frombuffer(array("Q", numbers), np.uint64)


def _outside(segment: Segment, offsets: Sequence[int], rooms: Sequence[int]) -> InvalidRequest:
    """The first that is not within the segment; there is one."""
    offset, room = next(
        (offset, room)
        for offset, room in zip(offsets, rooms, strict=True)
        if offset < 0 or room < 0 or offset + room > segment.nbytes
    )
    return InvalidRequest(
        f"{room} bytes at {offset} are not within a segment of {segment.nbytes} bytes"
    )


def rooms_between(offsets: Sequence[int], nbytes: int) -> list[int]:
    """Up to the next offset behind each one, or the end."""
    ends = sorted({*offsets, nbytes})
    following = dict(itertools.pairwise(ends))
    return [following.get(offset, -1) - offset for offset in offsets]
