"""The `shm` transport: its target's end, and connections.

Each end copies received bytes out of the other's memory, which it maps read-only or reads by address. The Unix socket
carries requests, descriptors and, as a stream, the bytes of memory that cannot be reached. Its rule: bytes are stored
only inside an open window, here or by an initiator with a lease of it.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from functools import partial

from moonserve.protocol.errors import ConfigError, InvalidRequest, MoonserveError, PeerLost, StaleLease
from moonserve.protocol.process.machine import boot_id
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.memfd import OwnedMemory, PeerMemory
from moonserve.transfer.memory.scatter import LOCAL, REMOTE, Rows
from moonserve.transfer.memory.segments import Segment
from moonserve.transfer.memory.write_windows import LEASE_BYTES, WriteLease
from moonserve.transfer.paths.peer_address import Address, Rail
from moonserve.transfer.shm.peer_memory import PeerSegments, copy_in_steps, is_visible
from moonserve.transfer.shm.session import ShmSession
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.tcp.frames import (
    HEADER_BYTES,
    Header,
    Kind,
    ProtocolViolation,
    decode,
    encode,
    receive_rows,
    refusal,
)
from moonserve.transfer.tcp.session import authenticate
from moonserve.transfer.tcp.target import Acceptor, StreamTarget
from moonserve.transfer.transport_interface import Dial, ServedState

_BACKLOG_S = 0.5
"""Longest wait for a peer that accepts no connections (stopped, or flooded)."""
_MAX_OFFERS = 4096
"""Segments that one peer may have mapped here at a time."""


class ShmTransport:
    name = "shm"

    def __init__(self) -> None:
        self._markers: dict[int, OwnedMemory] = {}
        """Markers of segments that peers cannot map, by segment id."""

    def listen(self, state: ServedState) -> Sequence[Acceptor]:
        name = f"moonserve-{state.credentials.instance.hex()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{name}")
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on the abstract socket {name}: {error}") from error
        rail = Rail(self.name, self.name, name)
        return [Acceptor(listener, rail, state, partial(self._target, state))]

    def _target(self, state: ServedState, sock: socket.socket) -> "ShmTarget":
        return ShmTarget(Connection(sock), state, markers=self._markers)

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
        return ShmSession(dial, connection, agreed, markers=self._markers)

    def segment_added(self, segment: Segment) -> None:
        """Creates a marker for memory that peers cannot map. Raises ConfigError if no descriptor is left."""
        if segment.memory is None:
            self._markers[segment.segment_id] = OwnedMemory(1)

    def segment_removed(self, segment: Segment) -> None:
        marker = self._markers.pop(segment.segment_id, None)
        if marker is not None:
            marker.mark_dead()


class ShmTarget(StreamTarget):
    """Serves one connection over the Unix socket and shared memory, on its own thread."""

    def __init__(self, connection: Connection, state: ServedState, *, markers: Mapping[int, OwnedMemory]) -> None:
        super().__init__(connection, state)
        self._markers = markers
        self._offered = PeerSegments(connection.peer_pid)
        self._lease: WriteLease | None = None

    def close(self) -> None:
        if self._lease is not None:
            self._lease.end()
        self._offered.close()

    def next_request(self) -> None:
        header = decode(self.idle_receive(HEADER_BYTES))
        fd = self.connection.take_descriptor()
        try:
            self._take(header, fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _take(self, header: Header, fd: int | None) -> None:
        match header.kind:
            case Kind.OFFER:
                self._accept_offer(header, fd)
            case Kind.MAP:
                self._share_memory(header)
            case Kind.LEASE:
                self._lend_window(header, fd)
            case Kind.WRITE_FROM:
                self._write_from(header)
            case _:
                self.dispatch(header)

    def _share_memory(self, header: Header) -> None:
        """Answers MAP with the memory itself, or with a marker and the segment's address in this process."""
        try:
            segment = self.readable(header.segment_id)
        except MoonserveError as error:
            self.connection.send(refusal(error))
            return
        shared = segment.memory or self._markers.get(segment.segment_id)
        base = 0 if segment.memory else segment.base
        reply = Header(kind=Kind.REPLY, source_id=base, nbytes=segment.nbytes)
        self.connection.send(encode(reply), shared.shared_fd if shared is not None else None)

    def _lend_window(self, header: Header, fd: int | None) -> None:
        """Answers LEASE. The previous lease of the connection ends."""
        if self._lease is not None:
            self._lease.end()
        try:
            window = self._windows.find(header.window_id, header.segment_id)
            memory, process = window.segment.memory, self.connection.peer_pid()
            if memory is None or fd is None or not is_visible(process):
                raise InvalidRequest("this window cannot be leased")
            self._lease = WriteLease(window, PeerMemory(fd, LEASE_BYTES, writable=True), process)
        except (InvalidRequest, StaleLease) as error:
            self.connection.send(refusal(error))
        else:
            self.connection.send(encode(Header(kind=Kind.REPLY, nbytes=window.segment.nbytes)), memory.fd)

    def _accept_offer(self, header: Header, fd: int | None) -> None:
        if fd is None or header.source_id in self._offered:
            raise ProtocolViolation("an offer has no memory or repeats a segment")
        if len(self._offered) >= _MAX_OFFERS:
            raise ProtocolViolation("too many offers")
        self._offered.add(header.source_id, fd, header.window_id, header.nbytes)
        if header.window_id:
            taken = self._offered.get(header.source_id) is not None
            self.connection.send(encode(Header(kind=Kind.REPLY, nbytes=int(taken))))

    def _write_from(self, header: Header) -> None:
        rows = receive_rows(self.connection, header)
        if self.connection.hung_up():  # it may have reused its memory
            raise PeerLost("the initiator has closed the connection")
        self.reply_with_outcome(lambda: self._copy_from(header, rows))

    def _copy_from(self, header: Header, rows: Rows) -> None:
        window = self.window_for(header, rows)
        source = self._offered.get(header.source_id)
        if source is None:
            raise InvalidRequest(f"segment {header.source_id} of the initiator was never offered")
        scatter.require_inside(rows, LOCAL, source.nbytes)
        copy_in_steps(source, window.segment, rows, to_column=REMOTE, verified=self.checksums, guard=window)
