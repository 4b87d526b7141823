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
