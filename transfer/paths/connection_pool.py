"""Which peers and connections an engine keeps: peers from first use until long unused, connections up to a limit
(SIEVE, Zhang et al., NSDI '24), broken ones until they are fenced.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Generic, Protocol, TypeVar

from moonserve.protocol.errors import InvalidRequest

_MAX_TARGETS = 1024
"""Targets with unfenced connections. Most never come back; the oldest are forgotten."""
_UNUSED_S = 300.0
"""Time after which an unused peer is dropped."""


class PooledConnection(Protocol):
    """The connection of a lane."""

    @property
    def idle(self) -> bool: ...

    def disconnect_when_idle(self) -> None: ...


class ConnectionPool:
    """Connected endpoints, limited to a cap by SIEVE. Thread-safe; never blocks.

    A use sets a bit and moves nothing. A hand moves from old to new, clears the bits that it passes and evicts the
    first idle endpoint without one. So an endpoint used once goes soon and a repeatedly used one stays. Busy endpoints
    stay, and may exceed the cap until one falls idle.
    """

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._lock = threading.Lock()
        self._used: dict[PooledConnection, bool] = {}
        """Use bit of each endpoint, oldest first."""
        self._hand: PooledConnection | None = None
        """Next candidate; None means the oldest."""

    def __len__(self) -> int:
        return len(self._used)

    def opened(self, endpoint: PooledConnection) -> None:
        with self._lock:
            evicted = self._evict() if len(self._used) >= self._cap else None
            self._used[endpoint] = False
        if evicted is not None:
            evicted.disconnect_when_idle()

    def used(self, endpoint: PooledConnection) -> None:
        with self._lock:
            if endpoint in self._used:
                self._used[endpoint] = True

    def closed(self, endpoint: PooledConnection) -> None:
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

    def _evict(self) -> PooledConnection | None:
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

    def _remove(self, endpoint: PooledConnection) -> None:
        if endpoint is self._hand:
            order = list(self._used)
            newer = order[order.index(endpoint) + 1 :]
            self._hand = newer[0] if newer else None
        del self._used[endpoint]


class UnfencedConnections:
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


class KnownPeer(Protocol):
    """A peer that the table can end."""

    used_at: float
    """Time of the last use, in monotonic seconds."""

    @property
    def idle(self) -> bool: ...
    @property
    def stopped(self) -> bool: ...
    def forget(self) -> None: ...
    def join(self) -> None: ...


_Peer = TypeVar("_Peer", bound=KnownPeer)


class PeerTable(Generic[_Peer]):
    """Peers of one engine by address, created at first use and ended when forgotten or long unused.

    An ended peer is kept until its threads have stopped, so that `close` leaves no thread behind. Thread-safe;
    `by_address` may be read without the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.by_address: dict[str, _Peer] = {}
        self.ending: list[_Peer] = []
        """Peers that were requested to end and whose threads may still run."""
        self.closed = False

    def get_or_create(self, address: str, make: Callable[[], _Peer]) -> _Peer:
        """Returns the peer, made on first use. Raises InvalidRequest once closed, and any error of `make`."""
        with self._lock:
            if self.closed:
                raise InvalidRequest("the transfer engine is closed")
            peer = self.by_address.get(address)
            if peer is None:
                self._drop_unused()
                peer = self.by_address[address] = make()
        return peer

    def forget(self, address: str) -> None:
        """Ends one peer; its batches fail immediately. Does not block."""
        with self._lock:
            self.ending = [peer for peer in self.ending if not peer.stopped]
            if (peer := self.by_address.pop(address, None)) is not None:
                self.ending.append(peer)
                peer.forget()

    def close(self) -> None:
        """Refuses new peers and ends all known ones. On return no thread of a peer runs. Idempotent."""
        with self._lock:
            self.closed, peers = True, [*self.by_address.values(), *self.ending]
            self.by_address, self.ending = {}, []
        for peer in peers:
            peer.forget()
        for peer in peers:
            peer.join()

    def _drop_unused(self) -> None:
        """Drops unused peers, since each vanished peer leaves an entry behind. The lock is held."""
        before = time.monotonic() - _UNUSED_S
        for known, peer in list(self.by_address.items()):
            if peer.idle and peer.used_at < before:
                del self.by_address[known]
                peer.forget()  # a caller that still holds this peer must not start transfers on it
