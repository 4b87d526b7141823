"""Pool of registered memory for values that have no place of their own. Thread-safe.

Segments are kept between calls, because fresh pages cost more than the copy (0.9 against 12 GB/s). Knows no keys.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from transfer import Segment, TransferEngine

_SMALLEST = 64 * 1024
_KEPT_BYTES = 64 * 2**20


class Scratch:
    """Segments to borrow, each by one borrower at a time."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._idle: list[Segment] = []

    @contextlib.contextmanager
    def borrow(self, nbytes: int) -> Iterator[Segment]:
        """Lends at least `nbytes` of memory. No transfer may use it after the block."""
        segment = self._take(nbytes)
        if segment is None:
            segment = self._engine.allocate(max(_SMALLEST, 1 << (nbytes - 1).bit_length()))
        try:
            yield segment
        finally:
            self._give_back(segment)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for segment in idle:
            self._engine.deregister(segment)

    def _take(self, nbytes: int) -> Segment | None:
        with self._lock:
            fitting = [segment for segment in self._idle if segment.nbytes >= nbytes]
            if not fitting:
                return None
            smallest = min(fitting, key=lambda segment: segment.nbytes)
            self._idle.remove(smallest)
            return smallest

    def _give_back(self, segment: Segment) -> None:
        with self._lock:
            if sum(idle.nbytes for idle in self._idle) + segment.nbytes <= _KEPT_BYTES:
                self._idle.append(segment)
                return
        self._engine.deregister(segment)
