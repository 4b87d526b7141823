"""Checksum of KV blocks: XXH3-64, computed by a block's writer and verified by every reader.

It protects against corruption, not against an adversary; the transfer handshake authenticates peers. XXH3 runs at
memory speed, so verification is on by default everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash


def checksum(pieces: Iterable[memoryview | bytes]) -> int:
    """Returns the XXH3-64 of the concatenation of `pieces`."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


class RunningChecksum:
    """Incremental form of `checksum` for pieces that become available one after the other, in order."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def add(self, piece: memoryview | bytes) -> None:
        self._state.update(piece)

    @property
    def value(self) -> int:
        """Checksum of all pieces added so far."""
        return self._state.intdigest()


_BITS = 64


def join(parts: Sequence[int]) -> int:
    """Packs the checksums of a block's parts into one number, the first part in the lowest bits.

    Each part is held by another process. The result for a single part is that part's checksum."""
    return sum(part << index * _BITS for index, part in enumerate(parts))


def split(joined: int, num_parts: int) -> tuple[int, ...]:
    """Unpacks the checksums that `join` packed."""
    return tuple(joined >> index * _BITS & (1 << _BITS) - 1 for index in range(num_parts))
