"""The checksum of KV blocks: XXH3-64, made by a block's writer and verified by every reader.

It guards against corruption, not against an adversary; the transfer handshake authenticates peers. XXH3 runs at
memory speed, so verification is on by default everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash


def checksum(pieces: Iterable[memoryview | bytes]) -> int:
    """XXH3-64 over the concatenation of `pieces`, in order."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


class RunningChecksum:
    """The same checksum for a writer that has its pieces one after the other; `add` them in order."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def add(self, piece: memoryview | bytes) -> None:
        self._state.update(piece)

    @property
    def value(self) -> int:
        """Of all pieces so far."""
        return self._state.intdigest()


_BITS = 64


def join(parts: Sequence[int]) -> int:
    """One number for the checksums of a block's parts, each of which somebody else has: the first part's bits lowest.
    Of one part it is its checksum."""
    return sum(part << index * _BITS for index, part in enumerate(parts))


def split(joined: int, num_parts: int) -> tuple[int, ...]:
    """The checksums that `join` was given."""
    return tuple(joined >> index * _BITS & (1 << _BITS) - 1 for index in range(num_parts))
