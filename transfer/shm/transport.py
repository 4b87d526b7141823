"""The `shm` transport: peers under one kernel, who read each other's memory.

Each end copies what it receives out of the other's memory, which it maps read-only or reads by address.
The Unix socket carries requests and descriptors, and the bytes of memory that cannot be reached so.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

from protocol.errors import ConfigError, PeerLost
from transfer.address import Address, Rail, host_identity
from transfer.base import Dial, Hosted
from transfer.segments import Segment
from transfer.shm.copying import Copier
from transfer.shm.markers import Markers
from transfer.shm.session import ShmSession
from transfer.shm.target import ShmTarget
from transfer.wire.acceptor import Acceptor
from transfer.wire.connection import Connection
from transfer.wire.stream import authenticate

_BACKLOG_S = 0.5
"""How long to wait for a peer that does not take connections (stopped, or flooded)."""


class ShmTransport:
    name = "shm"

    def __init__(self) -> None:
        self._markers = Markers()
        self._copier = Copier(threads=1)

    def listen(self, hosted: Hosted) -> Sequence[ShmListener]:
        name = f"moonserve-{hosted.credentials.instance.hex()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{name}")
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on the abstract socket {name}: {error}") from error
        copier = self._copier = Copier(hosted.options.copy_threads)

        def target(sock: socket.socket) -> ShmTarget:
            return ShmTarget(Connection(sock), hosted, copier=copier, markers=self._markers)

        acceptor = Acceptor(listener, Rail(self.name, self.name, name), hosted, target)
        return [ShmListener(acceptor, copier)]

    def reachable(self, address: Address) -> bool:
        return self.name in address.rails and address.host == host_identity()

    def connect(self, dial: Dial) -> ShmSession:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Blocks only while the peer's backlog is full; a non-blocking connect could not wait.
            left_s = min(dial.deadline_at - time.monotonic(), _BACKLOG_S)
            timeout = struct.pack("@ll", 0, max(1, int(left_s * 1e6)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            sock.connect("\0" + dial.remote.endpoint)
        except OSError as error:
            sock.close()
            raise PeerLost(f"cannot connect over shm: {error}") from error
        connection = Connection(sock)
        agreed = authenticate(connection, dial)
        return ShmSession(dial, connection, agreed, copier=self._copier, markers=self._markers)

    def segment_added(self, segment: Segment) -> None:
        self._markers.add(segment)

    def segment_removed(self, segment: Segment) -> None:
        self._markers.remove(segment)


class ShmListener:
    """The acceptor, and the threads that copy for it and for this transport's sessions."""

    def __init__(self, acceptor: Acceptor, copier: Copier) -> None:
        self.rail = acceptor.rail
        self._acceptor = acceptor
        self._copier = copier

    def close(self) -> None:
        self._acceptor.close()
        self._copier.close()
