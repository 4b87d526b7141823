"""Connections that broke under WRITEs which then failed, per target, until a fence has ended them.

The target may still be storing what they carried, on top of a later WRITE. Kept beside the peers, since
a peer that was forgotten may be met again. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

_MAX_TARGETS = 1024
"""Most of those that never come back; the oldest are forgotten."""


class Unfenced:
    """Connection ids by the target's instance."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[bytes, frozenset[int]] = {}

    def at(self, instance: bytes) -> Collection[int]:
        return self._connections.get(instance, ())

    def add(self, instance: bytes, connection_ids: Iterable[int]) -> None:
        with self._lock:
            known = self._connections.pop(instance, frozenset())
            self._connections[instance] = known.union(connection_ids)
            if len(self._connections) > _MAX_TARGETS:
                del self._connections[next(iter(self._connections))]

    def remove(self, instance: bytes, connection_ids: Iterable[int]) -> None:
        """They have ended."""
        with self._lock:
            left = self._connections.pop(instance, frozenset()).difference(connection_ids)
            if left:
                self._connections[instance] = left
