"""Checksums of values while they arrive: what has come is hashed, still in the cache, while the rest is on its way.

Knows neither whose values they are nor what their checksums should be.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvstore.express.link import Link
from protocol.checksum import RunningChecksum

PIECE_BYTES = 128 * 1024
"""So much at a time: fewer system calls than value by value, and still in the cache (LOG.md)."""


def checksums_on_arrival(
    link: Link, values: Sequence[memoryview | None], lengths: Sequence[int], give_up_at: float
) -> list[int]:
    """Of values that `link` was told to receive next, one behind the other; all have arrived when it returns.

    A value without memory is not hashed: 0. Raises as `Link.pump`.
    """
    found: list[int] = []
    arrived = end = link.received
    all_end = end + sum(lengths)
    for value, length in zip(values, lengths, strict=True):
        begin, end = end, end + length
        if value is not None and length > PIECE_BYTES:
            found.append(_large(link, value, begin, give_up_at))
            arrived = link.received
            continue
        if arrived < end:
            arrived = _until(link, max(end, min(arrived + PIECE_BYTES, all_end)), give_up_at)
        found.append(0 if value is None else xxhash.xxh3_64_intdigest(value))
    return found


def _large(link: Link, value: memoryview, begin: int, give_up_at: float) -> int:
    running, hashed = RunningChecksum(), 0
    while hashed < len(value):
        wanted = min(hashed + PIECE_BYTES, len(value))
        if link.received < begin + wanted:
            _until(link, begin + wanted, give_up_at)
        arrived = min(link.received - begin, len(value))
        running.add(value[hashed:arrived])
        hashed = arrived
    return running.value


def _until(link: Link, received: int, give_up_at: float) -> int:
    """What has come then."""
    link.wait_for(received)
    link.pump(give_up_at)
    return link.received
