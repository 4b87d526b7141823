"""Garbage collection settings for processes whose event loop must answer within milliseconds."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# With the interpreter's default of 700, a collection took up to 3.5 ms in the conductor (64 instances, 2,600
# placements/s: 9 placements arrive meanwhile) and 50 ms in the gateway. The value must not be too large, since gRPC's
# server leaves a cycle of six objects, 950 bytes, behind every call (grpcio 1.85): with 100,000 that adds up to 16 MB.
_COLLECT_AFTER = 10_000
# Survivors of this many collections contain only calls that were in flight during one of them. Collecting the older
# generation takes 40 ms in a busy conductor, because its record of decisions is part of it.
_LOOKS_BEFORE_OLDER = 100


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Makes collections rare within the block and excludes all objects that exist now from them."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, _LOOKS_BEFORE_OLDER, before[2])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
