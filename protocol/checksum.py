"""The checksum of KV blocks: XXH3-64, made by a block's writer and verified by every reader.

It guards against corruption, not against an adversary; the transfer handshake authenticates peers. XXH3 runs at
memory speed, so verification is on by default everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

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
