"""The `shm` transport: peers under one kernel read each other's memory.

Each end copies received bytes out of the other's memory, which it maps read-only or reads by address. The Unix socket
carries requests, descriptors and the bytes of unreachable memory. Its rule is the stream's: bytes are stored only
inside an open window. A WRITE is a copy made by the target after its checks.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from functools import partial

from protocol.errors import ConfigError, InvalidRequest, MoonserveError, PeerLost
from protocol.machine import boot_id
from transfer import scatter
from transfer.address import Address, Rail
from transfer.base import Dial, Hosted
from transfer.scatter import LOCAL, REMOTE, Rows
from transfer.segments import Segment
from transfer.shm.copying import Copier
from transfer.shm.memfd import OwnedMemory
from transfer.shm.session import ShmSession
from transfer.shm.sources import Sources
from transfer.tcp.acceptor import Acceptor
from transfer.tcp.connection import Connection
from transfer.tcp.frames import (
    HEADER_BYTES,
    Header,
    Kind,
    ProtocolViolation,
    decode,
    encode,
    receive_rows,
    refusal,
)
from transfer.tcp.session import authenticate
from transfer.tcp.target import StreamTarget

_BACKLOG_S = 0.5
"""Longest wait for a peer that accepts no connections (stopped, or flooded)."""
_MAX_OFFERS = 4096
"""Segments that one peer may have mapped here at a time."""


class ShmTransport:
    name = "shm"

    def __init__(self) -> None:
        self._markers: dict[int, OwnedMemory] = {}
        """Markers of segments that peers cannot map, by segment id."""
        self._copier = Copier(threads=1)

    def listen(self, hosted: Hosted) -> Sequence[Acceptor]:
        name = f"moonserve-{hosted.credentials.instance.hex()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{name}")
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on the abstract socket {name}: {error}") from error
        self._copier = Copier(hosted.options.copy_threads)
        rail = Rail(self.name, self.name, name)
        make = partial(self._target, hosted)
        return [Acceptor(listener, rail, hosted, make, self._copier.close)]

    def _target(self, hosted: Hosted, sock: socket.socket) -> ShmTarget:
        return ShmTarget(Connection(sock), hosted, copier=self._copier, markers=self._markers)

    def reachable(self, address: Address) -> bool:
        return self.name in address.rails and address.host == boot_id()

    def connect(self, dial: Dial) -> ShmSession:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Blocks only while the peer's backlog is full; a non-blocking connect could not wait for room.
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
        """Creates a marker for memory that peers cannot map. Raises ConfigError if no descriptor is left."""
        if segment.memory is None:
            self._markers[segment.segment_id] = OwnedMemory(1)

    def segment_removed(self, segment: Segment) -> None:
        marker = self._markers.pop(segment.segment_id, None)
        if marker is not None:
            marker.retire()


class ShmTarget(StreamTarget):
    """Serves one connection over the Unix socket and shared memory, on its own thread."""

    def __init__(
        self,
        connection: Connection,
        hosted: Hosted,
        *,
        copier: Copier,
        markers: Mapping[int, OwnedMemory],
    ) -> None:
        super().__init__(connection, hosted)
        self._copier = copier
        self._markers = markers
        self._offered = Sources(connection.peer_pid)

    def close(self) -> None:
        self._offered.close()

    def next_request(self) -> None:
        data = self.idle_receive(HEADER_BYTES)
        fd = self.connection.take_descriptor()
        try:
            self._take(decode(data), fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _take(self, header: Header, fd: int | None) -> None:
        match header.kind:
            case Kind.OFFER:
                self._accept_offer(header, fd)
            case Kind.MAP:
                self._lend(header)
            case Kind.WRITE_FROM:
                self._write_from(header)
            case _:
                self.dispatch(header)

    def _lend(self, header: Header) -> None:
        """Answers MAP with the memory itself, or with a marker and the segment's address in this process."""
        try:
            segment = self.readable(header.segment_id)
        except MoonserveError as error:
            self.connection.send(refusal(error))
            return
        lent = segment.memory or self._markers.get(segment.segment_id)
        base = 0 if segment.memory else segment.base
        reply = Header(kind=Kind.REPLY, source_id=base, nbytes=segment.nbytes)
        self.connection.send(encode(reply), lent.lent_fd if lent is not None else None)

    def _accept_offer(self, header: Header, fd: int | None) -> None:
        if fd is None or header.source_id in self._offered:
            raise ProtocolViolation("an offer without memory, or twice")
        if len(self._offered) >= _MAX_OFFERS:
            raise ProtocolViolation("too many offers")
        self._offered.add(header.source_id, fd, header.window_id, header.nbytes)
        if header.window_id:
            taken = self._offered.get(header.source_id) is not None
            self.connection.send(encode(Header(kind=Kind.REPLY, nbytes=int(taken))))

    def _write_from(self, header: Header) -> None:
        rows = receive_rows(self.connection, header)
        if self.connection.hung_up():
            raise PeerLost("the initiator gave up")
        self.answer(lambda: self._copy_from(header, rows))

    def _copy_from(self, header: Header, rows: Rows) -> None:
        window = self.window_for(header, rows)
        source = self._offered.get(header.source_id)
        if source is None:
            raise InvalidRequest(f"segment {header.source_id} of the initiator was never offered")
        scatter.require_inside(rows, LOCAL, source.nbytes)
        self._copier.copy(source, window.segment, rows, to_column=REMOTE, verified=self.checksums, guard=window)
