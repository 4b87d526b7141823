"""Accepts connections on a listening socket: one thread accepts, one thread per peer serves.

Its rule: a peer that does not authenticate within the handshake's time limit is dropped, and unauthenticated peers
cannot take more than `_MAX_CONNECTIONS` threads. Knows no frames.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from protocol.errors import MoonserveError, PeerLost
from transfer.address import Rail
from transfer.base import Hosted
from transfer.tcp import handshake
from transfer.tcp.connection import Connection
from transfer.tcp.target import StreamTarget

_log = logging.getLogger(__name__)

_HANDSHAKE_S = 5.0
"""Time limit of the handshake on this side. A connection that has not authenticated by then is closed, since it takes
one of `_MAX_CONNECTIONS` threads. No call is limited by it: a dialling peer waits until its own deadline, however long
this process is stopped."""
_MAX_CONNECTIONS = 1024


def _nothing() -> None:
    pass


class Acceptor:
    """Serves peers on one published rail until closed. Owns the listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        rail: Rail,
        hosted: Hosted,
        make_target: Callable[[socket.socket], StreamTarget],
        on_closed: Callable[[], None] = _nothing,
    ) -> None:
        """Starts accepting. `make_target` creates the handler of an accepted socket; `on_closed` ends what the handlers
        use."""
        self.rail = rail
        self._listener = listener
        self._hosted = hosted
        self._make_target = make_target
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._serving: dict[Connection, threading.Thread] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"transfer-accept {rail.endpoint}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops accepting and serving. On return none of its threads runs and nothing more is stored."""
        self._closed.set()
        with suppress(OSError):  # already closed
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            serving = dict(self._serving)
        for connection in serving:
            connection.abort()
        for thread in serving.values():
            thread.join()
        self._on_closed()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closed.wait(0.1):  # out of descriptors: give others time to close
                    _log.warning("cannot accept: %s", error)
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        with self._lock:
            if len(self._serving) >= _MAX_CONNECTIONS:
                _log.warning("more than %d connections on %s", _MAX_CONNECTIONS, self.rail.endpoint)
                sock.close()
                return
            try:
                target = self._make_target(sock)
            except OSError:  # the peer already hung up, so the socket has no peer address
                sock.close()
                return
            thread = threading.Thread(target=self._serve, args=(target,), name="transfer-target", daemon=True)
            self._serving[target.connection] = thread
            try:
                thread.start()
            except RuntimeError as error:  # the process may not start more threads
                _log.warning("cannot serve a connection: %s", error)
                del self._serving[target.connection]
                sock.close()

    def _serve(self, target: StreamTarget) -> None:
        connection = target.connection
        served = self._hosted.served.add(connection.abort)
        try:
            connection.set_deadline(time.monotonic() + _HANDSHAKE_S)
            agreed = handshake.respond(
                connection,
                self._hosted.credentials,
                served.connection_id,
                checksums=self._hosted.options.checksums,
            )
            target.checksums = agreed.checksums
            target.serve()
        except MoonserveError as error:
            level = logging.DEBUG if type(error) is PeerLost else logging.WARNING
            _log.log(level, "connection to %s ended: %s", self.rail.endpoint, error)
        finally:
            connection.close()
            target.close()
            self._hosted.served.remove(served)
            with self._lock:
                del self._serving[connection]


@dataclass(frozen=True, slots=True, eq=False)
class ServedConnection:
    """One connection that is being served."""

    abort: Callable[[], None]
    connection_id: int = field(default_factory=lambda: secrets.randbits(63) | 1)
    """Random, so only the peer that received it in its handshake can name it."""
    ended: threading.Event = field(default_factory=threading.Event)


class ServedConnections:
    """Connections that are being served, by id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[int, ServedConnection] = {}

    def __len__(self) -> int:
        return len(self._served)

    def add(self, abort: Callable[[], None]) -> ServedConnection:
        served = ServedConnection(abort)
        with self._lock:
            self._served[served.connection_id] = served
        return served

    def remove(self, served: ServedConnection) -> None:
        """Removes a connection whose thread stores nothing any more."""
        with self._lock:
            self._served.pop(served.connection_id, None)
        served.ended.set()

    def end(self, connection_id: int, timeout_s: float) -> None:
        """Ends a connection; an unknown one has ended already. Raises PeerLost if it does not end in time."""
        served = self._served.get(connection_id)
        if served is None:
            return
        served.abort()
        if not served.ended.wait(timeout_s):
            raise PeerLost(f"a connection is still served after {timeout_s} s")
