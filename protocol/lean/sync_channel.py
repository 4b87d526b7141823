"""Lean calls for threads: one call at a time on a connection, as many connections as there are calls at once.

A call is one send and one receive, without an event loop between. Its rules: a call has a deadline, which is the
socket's own time limit; a connection on which anything went wrong is closed, which also tells the server to end the
call; one that was idle is looked at before it is used again, so that a restarted server is not taken for a lost one.
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

# A peer at work answers hot calls within this; being woken on another core costs a good part of it, and on a shared one
# yielding the processor loses nothing (benchmarks/rpc.py). Several threads that spin would only take time from each
# other and from the server.
SPIN_S = 100e-6


class SyncChannel(UnaryOnly):
    """May be used by any number of threads at once. `close` it when none does any more.

    `spin_s`: how long a call that is the only one looks for its reply before it goes to sleep.
    """

    def __init__(
        self,
        address: str,
        cluster_token: str,
        tls: Certificates | None = None,
        *,
        spin_s: float = SPIN_S,
    ) -> None:
        """Raises InvalidRequest for what is no address, Incompatible where only one end speaks TLS."""
        sockets.require_same_tls(address, tls)
        self._tls = tls
        self._spin_s = spin_s
        self._in_use: set[SyncConnection] = set()
        self._target = sockets.parse(address)
        self._address = address
        self._token = cluster_token
        self._idle: deque[SyncConnection] = deque()  # its append and pop are atomic

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
        """For a generated stub's constructor; its methods are called with `timeout`."""

        def call(request: Any, *, timeout: float, metadata: object = None) -> Any:
            payload = request_serializer(request)
            return response_deserializer(self.call(path, payload, timeout_s=timeout))

        return call

    def call(self, path: str, payload: bytes, *, timeout_s: float) -> bytes:
        """The serialized reply to a serialized request.

        Raises the MoonserveError that the handler raised, PeerLost, DeadlineExceeded, Unauthenticated, Incompatible or
        InvalidRequest.
        """
        give_up_at = time.monotonic() + timeout_s
        connection = self._take(give_up_at)
        self._in_use.add(connection)
        spin_s = self._spin_s if len(self._in_use) == 1 else 0.0
        try:
            status, reply = connection.exchange(path, payload, timeout_s, give_up_at, spin_s)
        except BaseException:  # what it would receive next may belong to this call
            connection.close()
            raise
        finally:
            self._in_use.discard(connection)
        self._idle.append(connection)
        if status == Status.OK:
            return reply
        raise failure_from_bytes(reply)

    def hand_over(self, path: str, *, timeout_s: float) -> socket.socket:
        """A connection of its own, handed over at the server to what `path` names; the caller's to close.

        Raises as `call`; Incompatible when the server knows no such path.
        """
        give_up_at = time.monotonic() + timeout_s
        connection = self._dialled(give_up_at)
        try:
            status, reply = connection.exchange(path, b"", timeout_s, give_up_at, self._spin_s)
            if status != Status.OK:
                raise failure_from_bytes(reply)
            return connection.detached()
        except BaseException:  # what it would receive next may belong to this call
            connection.close()
            raise

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take(self, give_up_at: float) -> SyncConnection:
        """The connection used last, since its memory is the warmest, or a new one."""
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
