"""Lean channel for threads: one call at a time per connection, and one connection per concurrent call.

A call is one send and one receive, without an event loop. Its deadline is the timeout of the socket. A connection is
closed after any error, which also makes the server cancel the call. An idle connection is checked before it is used
again, so that a restarted server is not mistaken for a lost one.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from protocol.failures import failure_from_bytes
from protocol.lean import sockets
from protocol.lean.channel import UnaryOnly
from protocol.lean.frames import Status
from protocol.lean.sync_connection import SyncConnection, TlsConnection
from protocol.tls import Certificates

# A busy peer answers frequent calls within this time. Waking up on another core costs a large part of it, and on a
# shared core yielding the processor loses nothing (benchmarks/rpc.py). With several calls in flight no thread spins,
# because they would take time from each other and from the server.
SPIN_S = 100e-6


class SyncChannel(UnaryOnly):
    """Channel to one lean address for any number of threads. Call `close` when no thread uses it any more.

    `spin_s` is how long a call polls for its reply before it blocks, if no other call is in flight.
    """

    def __init__(
        self,
        address: str,
        cluster_token: str,
        tls: Certificates | None = None,
        *,
        spin_s: float = SPIN_S,
    ) -> None:
        """Raises InvalidRequest if `address` is malformed, Incompatible if only one end uses TLS."""
        sockets.require_same_tls(address, tls)
        self._tls = tls
        self._spin_s = spin_s
        self._in_use: set[SyncConnection] = set()
        self._target = sockets.parse(address)
        self._address = address
        self._token = cluster_token
        self._idle: deque[SyncConnection] = deque()  # append and pop are atomic

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def unary_unary(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_of_grpc: object,
    ) -> Callable[..., Any]:
        """Makes a method for the constructor of a generated stub. Callers must pass `timeout`."""

        def call(request: Any, *, timeout: float, metadata: object = None) -> Any:
            payload = request_serializer(request)
            return response_deserializer(self.call(path, payload, timeout_s=timeout))

        return call

    def call(self, path: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Sends a serialized request and returns the serialized reply.

        Raises the MoonserveError of the handler, PeerLost, DeadlineExceeded, Unauthenticated, Incompatible or
        InvalidRequest.
        """
        give_up_at = time.monotonic() + timeout_s
        connection = self._take(give_up_at)
        self._in_use.add(connection)
        spin_s = self._spin_s if len(self._in_use) == 1 else 0.0
        try:
            status, reply = connection.exchange(path, payload, timeout_s, give_up_at, spin_s)
        except BaseException:  # the next bytes on it may belong to this call
            connection.close()
            raise
        finally:
            self._in_use.discard(connection)
        self._idle.append(connection)
        if status == Status.OK:
            return reply
        raise failure_from_bytes(reply)

    def hand_over(self, path: str, *, timeout_s: float) -> socket.socket:
        """Returns the socket of a new connection that the server has handed over to the owner of `path`.

        The caller must close it. Raises like `call`, and Incompatible if the server does not know the path.
        """
        give_up_at = time.monotonic() + timeout_s
        connection = self._dialled(give_up_at)
        try:
            status, reply = connection.exchange(path, b"", timeout_s, give_up_at, self._spin_s)
            if status != Status.OK:
                raise failure_from_bytes(reply)
            return connection.detached()
        except BaseException:  # the next bytes on it may belong to this call
            connection.close()
            raise

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take(self, give_up_at: float) -> SyncConnection:
        """Returns the most recently used idle connection, because its memory is in cache, or a new one."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._dialled(give_up_at)
            if connection.is_quiet():
                return connection
            connection.close()

    def _dialled(self, give_up_at: float) -> SyncConnection:
        if self._tls is None or self._target[0] == socket.AF_UNIX:
            return SyncConnection(self._address, self._target, self._token, give_up_at)
        return TlsConnection(self._address, self._target, self._token, give_up_at, self._tls.initiator)
