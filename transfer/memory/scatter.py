"""Scatter lists: runs of bytes between a local and a remote segment, from `submit` to the system call.

Owns their layout, bounds checks, cutting and checksums. No I/O, no state.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import xxhash

from moonserve.protocol.errors import InvalidRequest

Rows = npt.NDArray[np.int64]
"""Contiguous runs of bytes: remote offset, local offset, length. Shape (n, 3), C-contiguous."""

REMOTE, LOCAL, LENGTH = 0, 1, 2

ROW_BYTES = 24
MAX_ROWS = 4096
"""Rows per frame. Bounds what a peer can make the other side hold to 96 KiB of rows per frame."""
LIMIT = 1 << 62
"""Upper bound of offsets, so that later sums fit into 64 bits."""


def rows(*runs: tuple[int, int, int]) -> Rows:
    """Builds Rows from (remote offset, local offset, length) triples."""
    return np.array(runs, dtype=np.int64).reshape(-1, 3)


def unpack(data: bytes | bytearray | memoryview) -> Rows:
    """Unpacks rows received from a peer. They are not yet validated."""
    return np.frombuffer(data, dtype="<i8").reshape(-1, 3)


def pack(rows: Rows) -> bytes:
    return rows.astype("<i8", copy=False).tobytes()


def total(rows: Rows) -> int:
    return int(rows[:, LENGTH].sum())


def require_inside(rows: Rows, side: int, nbytes: int) -> None:
    """Checks that each run on `side` lies in [0, nbytes), safe against overflow. Raises InvalidRequest otherwise."""
    offsets, lengths = rows[:, side], rows[:, LENGTH]
    if offsets.min(initial=0) < 0 or lengths.min(initial=0) < 0:
        raise InvalidRequest("negative offset or length")
    if bool((lengths > nbytes - offsets).any()):
        raise InvalidRequest(f"out of bounds of a segment of {nbytes} bytes")


def cut(rows: Rows, limit_bytes: int, limit_rows: int) -> Iterator[tuple[Rows, int]]:
    """Yields the runs in order, cut and grouped so that no group exceeds the limits, and the bytes of each group."""
    if int(rows[:, LENGTH].max(initial=0)) > limit_bytes:
        rows = _cut_long(rows, limit_bytes)
    ends = rows[:, LENGTH].cumsum()
    first, done = 0, 0
    while first < len(rows):
        last = min(int(ends.searchsorted(done + limit_bytes, side="right")), first + limit_rows)
        end = int(ends[last - 1])
        yield rows[first:last], end - done
        first, done = last, end


def _cut_long(rows: Rows, limit_bytes: int) -> Rows:
    """Cuts runs longer than the limit into several."""
    counts = np.maximum(1, -(-rows[:, LENGTH] // limit_bytes))
    pieces = np.repeat(rows, counts, axis=0)
    number = np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped = number * limit_bytes
    pieces[:, REMOTE] += skipped
    pieces[:, LOCAL] += skipped
    pieces[:, LENGTH] = np.minimum(pieces[:, LENGTH] - skipped, limit_bytes)
    return pieces


def checksum(buffer: memoryview, rows: Rows, side: int) -> int:
    """Returns the XXH3-64 of the runs' bytes on `side`, in order."""
    state = xxhash.xxh3_64()
    for offset, length in zip(rows[:, side].tolist(), rows[:, LENGTH].tolist(), strict=True):
        state.update(buffer[offset : offset + length])
    return state.intdigest()
