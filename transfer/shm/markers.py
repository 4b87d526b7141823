"""Which registered memory of this process still means something, for peers who read it by address.

Memory that the engine allocated carries its own marker (`memfd`). What a caller registered lies
anywhere, so a page of shared memory beside it is its marker.
"""

from __future__ import annotations

import threading

from transfer.segments import Segment
from transfer.shm.memfd import OwnedMemory


class Markers:
    """Of all segments of one engine that peers cannot map. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._markers: dict[int, OwnedMemory] = {}

    def of(self, segment: Segment) -> OwnedMemory | None:
        """None once the segment is gone."""
        with self._lock:
            return self._markers.get(segment.segment_id)

    def add(self, segment: Segment) -> None:
        """Raises ConfigError when there is no descriptor left."""
        if segment.memory is None:
            marker = OwnedMemory(1)
            with self._lock:
                self._markers[segment.segment_id] = marker

    def remove(self, segment: Segment) -> None:
        with self._lock:
            marker = self._markers.pop(segment.segment_id, None)
        if marker is not None:
            marker.retire()
