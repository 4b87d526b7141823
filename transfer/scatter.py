"""Arithmetic on scatter lists: packing, bounds, merging neighbours, copying. No I/O, no state."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from protocol.errors import InvalidRequest
from transfer.base import Row

Rows = npt.NDArray[np.int64]
"""Shape (n, 3): remote offset, local offset, length. What arrived from a peer, not yet trusted."""

REMOTE, LOCAL, LENGTH = 0, 1, 2
ROW_BYTES = 24
_GIL_BYTES = 65536
"""From here on a copy lets other threads run: below, handing over the GIL costs more than the copy."""


def pack(rows: Sequence[Row]) -> bytes:
    return struct.pack(f"<{3 * len(rows)}q", *chain.from_iterable(rows))


def unpack(data: bytes | bytearray) -> Rows:
    return np.frombuffer(data, dtype="<i8").reshape(-1, 3)


def total(rows: Sequence[Row]) -> int:
    return sum(row[LENGTH] for row in rows)


def require_inside(rows: Rows, side: int, nbytes: int) -> None:
    """Raises InvalidRequest unless each run on `side` lies in [0, nbytes). Overflow-proof."""
    offsets, lengths = rows[:, side], rows[:, LENGTH]
    if offsets.min(initial=0) < 0 or lengths.min(initial=0) < 0:
        raise InvalidRequest("negative offset or length")
    if bool((lengths > nbytes - offsets).any()):
        raise InvalidRequest(f"out of bounds of a segment of {nbytes} bytes")


def merge(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins each (offset, length) with its successor where they touch; order is kept."""
    merged: list[tuple[int, int]] = []
    start = end = None
    for offset, length in ranges:
        if offset != end:
            if start is not None and end is not None:
                merged.append((start, end - start))
            start = offset
        end = offset + length
    if start is not None and end is not None:
        merged.append((start, end - start))
    return merged


def views(buffer: memoryview, ranges: Iterable[tuple[int, int]]) -> list[memoryview]:
    return [buffer[offset : offset + length] for offset, length in merge(ranges) if length]


def copy(into: memoryview, out_of: memoryview, places: Iterable[tuple[int, int, int]]) -> None:
    """Copies each (destination offset, source offset, length)."""
    for to, start, length in places:
        if length < _GIL_BYTES:
            into[to : to + length] = out_of[start : start + length]
        else:
            target = np.frombuffer(into[to : to + length], np.uint8)
            np.copyto(target, np.frombuffer(out_of[start : start + length], np.uint8))


def chunks(rows: Iterable[Row], limit_bytes: int) -> Iterator[list[Row]]:
    """The same runs, cut and grouped so that no group exceeds `limit_bytes`."""
    group: list[Row] = []
    room = limit_bytes
    for remote, local, length in rows:
        while length > room:
            group.append((remote, local, room))
            yield group
            remote, local, length = remote + room, local + room, length - room
            group, room = [], limit_bytes
        group.append((remote, local, length))
        room -= length
    if group:
        yield group
