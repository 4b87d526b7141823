"""The data plane: bulk copies and stream I/O in one call each, with the GIL released.

`data_plane()` is `data_plane.c`, compiled once per machine, or Python where there is no compiler. A `Flow` keeps how
far both directions of a socket are: after IN_DONE or TIMEOUT add more, or nothing, and pump again.
"""

from __future__ import annotations

from transfer.native.base import (
    MAX_IOVECS,
    DataPlane,
    End,
    Flow,
    IoVectors,
    address_of,
    vectors,
)
from transfer.native.library import data_plane

__all__ = [
    "MAX_IOVECS",
    "DataPlane",
    "End",
    "Flow",
    "IoVectors",
    "address_of",
    "data_plane",
    "vectors",
]
