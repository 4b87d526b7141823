"""The live connections of one engine: no more than a cap, and the idle ones go first.

`rails.sieve` decides; this adds the lock and tells the lane. Connections that are all busy may exceed the cap
until one falls idle.
"""

from __future__ import annotations

import threading

from transfer.lane import Lane
from transfer.rails.sieve import EndpointPool


class Endpoints:
    """Thread-safe; blocks nobody."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._lock = threading.Lock()
        self._pool: EndpointPool[Lane] = EndpointPool(cap, busy=lambda lane: not lane.idle)

    def __len__(self) -> int:
        return len(self._pool)

    def opened(self, lane: Lane) -> None:
        with self._lock:
            evicted = self._pool.add(lane)
        if evicted is not None:
            evicted.disconnect_when_idle()

    def trim(self) -> None:
        """A lane fell idle: if there were too many, one can go now."""
        if len(self._pool) <= self._cap:
            return
        with self._lock:
            evicted = self._pool.trim()
        for lane in evicted:
            lane.disconnect_when_idle()

    def used(self, lane: Lane) -> None:
        with self._lock:
            if lane in self._pool:
                self._pool.touch(lane)

    def closed(self, lane: Lane) -> None:
        with self._lock:
            if lane in self._pool:
                self._pool.remove(lane)
