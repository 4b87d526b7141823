"""The live connections of one engine, at most a cap of them, and the broken ones that still need a fence.

Which connection is closed for a new one is decided by SIEVE (Zhang et al., NSDI '24).
"""

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

    A use sets a bit and moves nothing. A hand moves from old to new, clears the bits that it passes and
    evicts the first idle endpoint without one: an endpoint that was used once goes soon, one that is used
    again and again stays. Busy endpoints stay, and may exceed the cap until one of them falls idle.
    """

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._lock = threading.Lock()
        self._used: dict[Endpoint, bool] = {}
        """The bit of each endpoint, oldest first."""
        self._hand: Endpoint | None = None
        """The next candidate; None means the oldest."""

    def __len__(self) -> int:
        return len(self._used)

    def opened(self, endpoint: Endpoint) -> None:
        with self._lock:
            evicted = self._evict() if len(self._used) >= self._cap else None
            self._used[endpoint] = False
        if evicted is not None:
            evicted.disconnect_when_idle()

    def used(self, endpoint: Endpoint) -> None:
        with self._lock:
            if endpoint in self._used:
                self._used[endpoint] = True

    def closed(self, endpoint: Endpoint) -> None:
        with self._lock:
            if endpoint in self._used:
                self._remove(endpoint)

    def trim(self) -> None:
        """An endpoint fell idle: what exceeds the cap can go now."""
        while len(self._used) > self._cap:
            with self._lock:
                evicted = self._evict()
            if evicted is None:
                return
            evicted.disconnect_when_idle()

    def _evict(self) -> Endpoint | None:
        """Two rounds are enough: the first clears every bit that could save an idle endpoint."""
        order = list(self._used)
        first = 0 if self._hand is None else order.index(self._hand)
        for endpoint in 2 * (order[first:] + order[:first]):
            if not endpoint.idle:
                continue
            if not self._used[endpoint]:
                self._hand = endpoint
                self._remove(endpoint)
                return endpoint
            self._used[endpoint] = False
        return None

    def _remove(self, endpoint: Endpoint) -> None:
        if endpoint is self._hand:
            order = list(self._used)
            newer = order[order.index(endpoint) + 1 :]
            self._hand = newer[0] if newer else None
        del self._used[endpoint]


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
