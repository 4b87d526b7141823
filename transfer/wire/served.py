"""The connections that peers have opened to this engine, so that one can be ended through another.

Its rule: when `end` returns, nothing that the connection's peer had sent is stored any more. A WRITE
that is tried again elsewhere asks for that first; otherwise bytes still in the socket's buffer of the
first try could land on top of newer ones.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from protocol.errors import PeerLost


class ServedConnection:
    """One connection while it is served."""

    __slots__ = ("abort", "connection_id", "ended")

    def __init__(self, abort: Callable[[], None]) -> None:
        self.connection_id = secrets.randbits(63) | 1
        """Random: whoever names it has been told it in its handshake."""
        self.abort = abort
        self.ended = threading.Event()


class ServedConnections:
    """Thread-safe."""

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
        """Its thread stores nothing any more."""
        with self._lock:
            self._served.pop(served.connection_id, None)
        served.ended.set()

    def end(self, connection_id: int, timeout_s: float) -> None:
        """One that is unknown has ended. Raises PeerLost when it cannot be ended in time."""
        served = self._served.get(connection_id)
        if served is None:
            return
        served.abort()
        if not served.ended.wait(timeout_s):
            raise PeerLost(f"a connection is still served after {timeout_s} s")
