"""The data plane: bulk copies and stream I/O in one call each, with the GIL released.

`data_plane()` is `data_plane.c`, compiled once per machine, or its Python twin where there is no
compiler. How a connection uses it, one thread per connection, memory kept alive by the caller:

    flow = Flow()
    flow.send(vectors((address_of(header), len(header))))
    flow.send(plane.iovecs(address_of(segment.buffer), rows, column=LOCAL))
    flow.receive(vectors((address_of(reply), REPLY_BYTES)))
    match plane.pump(sock.fileno(), flow, timeout_ns=50_000_000, spin_ns=50_000): …

`flow` keeps how far both directions are: after IN_DONE or TIMEOUT add more, or nothing, and call again.
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
