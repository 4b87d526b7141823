"""The connections that this process serves, by id, so that a peer can end an earlier one of its own (FENCE)."""

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from moonserve.protocol.errors import PeerLost


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
