"""The `shm` transport, both ends: READs copy out of the peer's memory, WRITEs are copies that the target makes after
its checks, or small ones that the initiator makes under a lease.

Each end copies received bytes out of the other's memory, which it maps read-only or reads by address. The Unix socket
carries requests, descriptors and, as a stream, the bytes of memory that cannot be reached. Its rules: a descriptor is
passed only when that cannot block, since the peer may be sending answers; bytes are stored only inside an open window.
After a WRITE that succeeded, native code serves further ones from the same memory into the same window. After two in a
row from its caller's thread, the initiator asks for a lease of the window (native/leased_writes.h).
"""

import ctypes
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import partial

import numpy as np

from moonserve.protocol.errors import ConfigError, IntegrityError, InvalidRequest, MoonserveError, PeerLost, StaleLease
from moonserve.protocol.process.machine import boot_id
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import CopyRoute, address_of
from moonserve.transfer.memory.memfd import OwnedMemory, PeerMemory
from moonserve.transfer.memory.scatter import LOCAL, REMOTE, Rows
from moonserve.transfer.memory.segments import Segment
from moonserve.transfer.memory.write_windows import LEASE_BYTES, Window, WriteLease
from moonserve.transfer.paths.peer_address import Address, Rail
from moonserve.transfer.shm.peer_memory import STEP_BYTES, PeerSegments, ReadableMemory, copy_in_steps, is_visible
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
    request,
)
from moonserve.transfer.tcp.handshake import Agreement
from moonserve.transfer.tcp.session import StreamSession, authenticate
from moonserve.transfer.tcp.target import OK, STALL_S, Acceptor, StreamTarget
from moonserve.transfer.transport_interface import (
    Dial,
    Op,
    ServedState,
    Slice,
    SliceSource,
    without_traceback,
)

_IN_FLIGHT_BYTES = 64 << 20
"""Requests to copy out of offered memory carry no payload. This many bytes keep the target busy."""


class _Offer(Enum):
    """State of the offer of a local segment to the peer."""

    ASKED = auto()
    """The peer has not answered whether it can read this process's memory. Until then the stream carries the bytes."""
    TAKEN = auto()
    REFUSED = auto()


class ShmSession(StreamSession):
    """A stream session plus the reachable memory of the peer and the local segments offered to it."""

    def __init__(
        self,
        dial: Dial,
        connection: Connection,
        agreed: Agreement,
        *,
        markers: Mapping[int, OwnedMemory],
    ) -> None:
        super().__init__(dial, connection, agreed)
        self._max_in_flight = max(self._max_in_flight, _IN_FLIGHT_BYTES)
        self._markers = markers
        self._segments = PeerSegments(connection.peer_pid)
        self._written_segments = PeerSegments(connection.peer_pid, writable=True)
        self._lease = OwnedMemory(LEASE_BYTES)
        self._written: tuple[int | None, int] = None, 0  # the last window in a caller's thread, and how often in a row
        max_bytes, lease = min(STEP_BYTES, dial.options.slice_bytes_over("shm")), address_of(self._lease.view)
        self._route = (ctypes.c_int64 * 4)(max_bytes, connection.descriptor, self._checksums, lease)  # `InlineRoute`
        self._copy_natively = self._plane.library.copy_inline
        self._mapping: set[Slice] = set()
        """Slices whose next answer is a mapping."""
        self._offers: dict[int, _Offer] = {}
        """Offers by local segment id."""
        self._offering: set[Slice] = set()
        """Slices whose answer is preceded by the answer to an offer."""

    def close(self) -> None:
        super().close()
        self._segments.close()
        self._written_segments.close()

    def carry_inline(self, single: Slice) -> None:
        super().carry_inline(single)
        window_id = single.window_id if single.op is Op.WRITE else None
        self._written = window_id, self._written[1] + 1 if window_id == self._written[0] else 1
        if window_id and self._written[1] == 2:
            header = Header(kind=Kind.LEASE, segment_id=single.segment_id, window_id=window_id)
            self._connection.send(encode(header), self._lease.fd)
            with suppress(InvalidRequest, StaleLease):  # without a lease the target copies
                self._accept_memory(self._written_segments, single.segment_id)

    def send_request(self, part: Slice, slices: SliceSource) -> bool:
        if part.op is Op.READ:
            return self._request_read(part, slices)
        if part.window_id is None or not self._reachable_for_peer(part):
            return super().send_request(part, slices)
        header = Header(
            kind=Kind.WRITE_FROM,
            entries=len(part.rows),
            segment_id=part.segment_id,
            window_id=part.window_id,
            source_id=part.local.segment_id,
        )
        self._connection.queue(request(header, part.rows))
        return True

    def receive_reply(self, part: Slice) -> bool:
        if part in self._mapping:
            self._mapping.discard(part)
            return self._receive_map(part)
        if part in self._offering:
            self._offering.discard(part)
            taken = self.reply().nbytes
            self._offers[part.local.segment_id] = _Offer.TAKEN if taken else _Offer.REFUSED
        return super().receive_reply(part)

    def _request_read(self, part: Slice, slices: SliceSource) -> bool:
        if part.segment_id not in self._segments:
            self._connection.queue(encode(Header(kind=Kind.MAP, segment_id=part.segment_id)))
            self._mapping.add(part)
            return True
        source = self._segments.get(part.segment_id)
        if source is None:
            return super().send_request(part, slices)
        if not self.alive():  # a copy alone would not fail
            raise PeerLost("the peer has closed the connection")
        try:
            self._read(part, source)
        except (InvalidRequest, IntegrityError) as error:
            slices.settle(part, without_traceback(error))
        else:
            slices.settle(part, None)
        return False

    def _receive_map(self, part: Slice) -> bool:
        self._accept_memory(self._segments, part.segment_id)
        source = self._segments.get(part.segment_id)
        if source is None:
            header = Header(kind=Kind.READ, entries=len(part.rows), segment_id=part.segment_id)
            self._connection.queue(self.request(header, part.rows))
            return False
        self._read(part, source)
        return True

    def _accept_memory(self, segments: PeerSegments, segment_id: int) -> None:
        """Receives the answer to MAP or LEASE. Raises the peer's refusal."""
        data = self._connection.receive_bytes(HEADER_BYTES)
        fd = self._connection.take_descriptor()
        try:
            reply = self.accept(data)
            if segment_id not in segments:
                segments.add(segment_id, fd, reply.source_id, reply.nbytes)
        finally:
            if fd is not None:
                os.close(fd)

    def _read(self, part: Slice, source: ReadableMemory) -> None:
        scatter.require_inside(part.rows, REMOTE, source.nbytes)
        copy_in_steps(source, part.local, part.rows, to_column=LOCAL, verified=self._checksums)

    def _reachable_for_peer(self, part: Slice) -> bool:
        """Returns True if the peer can copy out of the slice's local memory. Offers the memory first if necessary."""
        segment = part.local
        state = self._offers.get(segment.segment_id)
        if state is None and self._offer(segment):
            if segment.memory is not None:
                state = _Offer.TAKEN
            else:
                state = _Offer.ASKED
                self._offering.add(part)
            self._offers[segment.segment_id] = state
        return state is _Offer.TAKEN

    def _offer(self, segment: Segment) -> bool:
        """Offers a segment to the peer. Returns False if that is impossible now."""
        shared = segment.memory or self._markers.get(segment.segment_id)
        if shared is None:
            return False
        offer = Header(
            kind=Kind.OFFER,
            source_id=segment.segment_id,
            window_id=0 if segment.memory else segment.base,
            nbytes=segment.nbytes,
        )
        return self._connection.try_send_descriptor(encode(offer), shared.shared_fd)

    def view(self, segment_id: int, offset: int, length: int, deadline_at: float) -> memoryview:
        if segment_id not in self._segments:
            self._connection.set_deadline(deadline_at)
            self._connection.send(encode(Header(kind=Kind.MAP, segment_id=segment_id)))
            self._accept_memory(self._segments, segment_id)
        source = self._segments.get(segment_id)
        if not isinstance(source, PeerMemory):
            raise InvalidRequest("memory that its owner registered, not allocated, cannot be mapped: READ it")
        source.require_live()
        if offset < 0 or length < 0 or length > source.nbytes - offset:
            raise InvalidRequest(f"out of bounds of a segment of {source.nbytes} bytes")
        return source.view[offset : offset + length]

    def copy_inline(self, window: int, segment: int, local: Segment, rows: bytes | int, count: int, path: int) -> int:
        memory = (self._written_segments if window else self._segments).get(segment)
        if type(memory) is not PeerMemory:
            return 0
        return int(self._copy_natively(self._route, path, memory.native, local.native, rows, count, window))


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
        self._route = CopyRoute()
        self._route_owners: tuple[Window, ReadableMemory] | None = None
        """Keeps the memory of the route."""
        self._lease: WriteLease | None = None

    def close(self) -> None:
        if self._lease is not None:
            self._lease.end()
        self._offered.close()

    def next_request(self) -> None:
        has_rows = self.connection.serve_copies(self._route, OK, STALL_S)
        self.connection.set_deadline(time.monotonic() + STALL_S)
        fd = self.connection.take_descriptor()
        try:
            header = decode(bytes(self._route.header))
            if has_rows:
                rows = np.frombuffer(self._route.rows, np.int64).reshape(-1, 3)
                self._write_from(header, rows[: header.entries].copy())
            else:
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
                self._write_from(header, receive_rows(self.connection, header))
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
        self._route.served[:] = [0] * len(self._route.served)  # the next line may unmap its source
        self._offered.add(header.source_id, fd, header.window_id, header.nbytes)
        if header.window_id:
            taken = self._offered.get(header.source_id) is not None
            self.connection.send(encode(Header(kind=Kind.REPLY, nbytes=int(taken))))

    def _write_from(self, header: Header, rows: Rows) -> None:
        if self.connection.hung_up():
            raise PeerLost("the initiator has closed the connection")
        self.reply_with_outcome(lambda: self._copy_from(header, rows))

    def _copy_from(self, header: Header, rows: Rows) -> None:
        window = self.window_for(header, rows)
        source = self._offered.get(header.source_id)
        if source is None:
            raise InvalidRequest(f"segment {header.source_id} of the initiator was never offered")
        scatter.require_inside(rows, LOCAL, source.nbytes)
        copy_in_steps(source, window.segment, rows, to_column=REMOTE, verified=self.checksums, guard=window)
        if isinstance(source, PeerMemory):
            self._serve_natively(header, window, source)

    def _serve_natively(self, header: Header, window: Window, source: PeerMemory) -> None:
        """Lets native code serve the next requests that differ from this one in their rows only."""
        route, segment = self._route, window.segment
        self._route_owners = window, source
        ctypes.memmove(route.served, encode(header._replace(entries=0)), HEADER_BYTES)
        route.window = window.state
        route.starts, route.ends = address_of(window.starts), address_of(window.ends)
        route.num_ranges = len(window.ends)
        route.to, route.source, route.live = segment.base, source.base, source.live_address
        route.source_bytes, route.max_bytes, route.verified = source.nbytes, STEP_BYTES, self.checksums
