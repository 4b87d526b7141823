"""Digests of keys that have left, oldest first. Pure."""

from __future__ import annotations

from array import array

from kvstore.native.base import MAX_RECORDS
from kvstore.native.library import key_map
from protocol.keys import KEY_BYTES, BlockKey

_COMPACT_AT_LEAST = 64
"""Shorter lines are not worth rebuilding."""


def digest_of(key: BlockKey) -> int:
    """64 bits by Python's own hash, whose secret clients do not know; two keys that share one only cost a hit."""
    return hash(key) % 2**64


class Ghosts:
    """A line of digests and where in it each stands. One that was taken leaves a gap until gaps are the majority."""

    def __init__(self) -> None:
        self._line = array("Q")
        self._head = 0  # those before it are gone
        # Taken off the line for good; so a digest's number stays the same.
        self._num_left_behind = 0
        self._numbers = key_map()  # by digest, modulo what the map can hold

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def nbytes(self) -> int:
        return self._line.__sizeof__() + self._numbers.nbytes

    def add(self, digest: int) -> None:
        self._numbers.put(_key(digest), self._number(len(self._line)))
        self._line.append(digest)
        if len(self._line) > max(_COMPACT_AT_LEAST, 2 * len(self)):
            self._compact()

    def take(self, digest: int) -> bool:
        """Whether it was there."""
        return self._numbers.pop(_key(digest)) >= 0

    def drop_oldest(self) -> None:
        """There is one."""
        while not self._is_there(self._head):
            self._head += 1
        self.take(self._line[self._head])
        self._head += 1

    def _is_there(self, place: int) -> bool:
        return self._numbers.get(_key(self._line[place])) == self._number(place)

    def _number(self, place: int) -> int:
        return (self._num_left_behind + place) % MAX_RECORDS

    def _compact(self) -> None:
        present = [self._line[i] for i in range(self._head, len(self._line)) if self._is_there(i)]
        self._num_left_behind += len(self._line)
        self._line, self._head = array("Q", present), 0
        for place, digest in enumerate(present):
            self._numbers.put(_key(digest), self._number(place))


def _key(digest: int) -> BlockKey:
    return BlockKey(digest.to_bytes(KEY_BYTES, "little"))
