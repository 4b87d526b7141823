"""Limits the live connections of one engine and records broken ones that still need a fence.

SIEVE (Zhang et al., NSDI '24) chooses the connection to close for a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Protocol

_MAX_TARGETS = 1024
"""Targets with unfenced connections. Most never come back; the oldest are forgotten."""


class Endpoint(Protocol):
    """The connection of a lane."""

    @property
    def idle(self) -> bool: ...

    def disconnect_when_idle(self) -> None: ...


class Endpoints:
    """Connected endpoints, limited to a cap by SIEVE. Thread-safe; never blocks.

    A use sets a bit and moves nothing. A hand moves from old to new, clears the bits that it passes and evicts the
    first idle endpoint without one. So an endpoint used once goes soon and a repeatedly used one stays. Busy endpoints
    stay, and may exceed the cap until one falls idle.
    """

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._lock = threading.Lock()
        self._used: dict[Endpoint, bool] = {}
        """Use bit of each endpoint, oldest first."""
        self._hand: Endpoint | None = None
        """Next candidate; None means the oldest."""

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
        """Evicts endpoints above the cap. Called when an endpoint falls idle."""
        while len(self._used) > self._cap:
            with self._lock:
                evicted = self._evict()
            if evicted is None:
                return
            evicted.disconnect_when_idle()

    def _evict(self) -> Endpoint | None:
        """Evicts one idle endpoint. Two rounds suffice: the first clears every bit that could save an idle endpoint."""
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
    """Ids of connections that broke under WRITEs which then failed, by target instance, until they are fenced.

    The target may still be storing their data, on top of a later WRITE. They are kept outside the peers, since a
    forgotten peer may be met again. Thread-safe.
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
        """Removes connections that have ended."""
        with self._lock:
            left = self._connections.pop(instance, frozenset()).difference(connection_ids)
            if left:
                self._connections[instance] = left
