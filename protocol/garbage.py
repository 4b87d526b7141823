"""The interpreter's search for cyclic garbage, in processes whose event loop answers others within milliseconds."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# With the interpreter's own 700 a look took up to 3.5 ms in the conductor (64 instances, 2,600 placements/s), within
# which 9 placements arrive, and 50 ms in the gateway. But gRPC's server leaves a cycle of six objects, 950 bytes,
# behind every call (grpcio 1.85): after 100,000 it were 16 MB.
_COLLECT_AFTER = 10_000
# A look at the survivors of so many finds only calls that were under way at one of them, and takes 40 ms of a busy
# conductor, whose record of decisions is among them.
_LOOKS_BEFORE_OLDER = 100


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Meanwhile the interpreter looks for cyclic garbage seldom, and never again at what exists now."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, _LOOKS_BEFORE_OLDER, before[2])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
