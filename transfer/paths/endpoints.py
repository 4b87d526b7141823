"""The live connections of one engine, at most a cap of them, and the broken ones that still need a fence."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Protocol

_MAX_TARGETS = 1024
"""Targets with unfenced connections. Most of them never come back; the oldest are forgotten."""


class Endpoint(Protocol):
    """A lane, as far as its connection is concerned."""

    @property
    def idle(self) -> bool: ...

    def disconnect_when_idle(self) -> None: ...


class Endpoints:
    """Endpoints that are connected. Thread-safe; blocks nobody.

    The one that was used least recently goes first. Busy endpoints stay, and may exceed the cap until
    one of them falls idle.
    """

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._lock = threading.Lock()
        self._open: dict[Endpoint, None] = {}
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, endpoint: Endpoint) -> None:
        with self._lock:
            evicted = self._evict() if len(self._open) >= self._cap else None
            self._open[endpoint] = None
        if evicted is not None:
            evicted.disconnect_when_idle()

    def used(self, endpoint: Endpoint) -> None:
        with self._lock:
            if endpoint in self._open:
                del self._open[endpoint]
                self._open[endpoint] = None

    def closed(self, endpoint: Endpoint) -> None:
        with self._lock:
            self._open.pop(endpoint, None)

    def trim(self) -> None:
        """An endpoint fell idle: what exceeds the cap can go now."""
        while len(self._open) > self._cap:
            with self._lock:
                evicted = self._evict()
            if evicted is None:
                return
            evicted.disconnect_when_idle()

    def _evict(self) -> Endpoint | None:
        evicted = next((endpoint for endpoint in self._open if endpoint.idle), None)
        if evicted is not None:
            del self._open[evicted]
        return evicted


class Unfenced:
    """Connections that broke under WRITEs which then failed, by the target's instance, until they are fenced.

    The target may still be storing what they carried, on top of a later WRITE. They are kept beside the
    peers, since a peer that was forgotten may be met again. Thread-safe.
    """

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
