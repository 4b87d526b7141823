"""The initiator's end of `shm`: READs copy out of the peer's memory; WRITEs are asked of the target or stored under a
lease.

Its rules: a descriptor is passed only when that cannot block, since the peer may be sending answers. At the third WRITE
in a row to one window, the initiator asks for a lease of it (native/leased_writes.h).
"""

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum, auto
from functools import partial

from moonserve.protocol.errors import IntegrityError, InvalidRequest, PeerLost, StaleLease
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import address_of
from moonserve.transfer.memory.memfd import OwnedMemory, PeerMemory
from moonserve.transfer.memory.scatter import LOCAL, REMOTE
from moonserve.transfer.memory.segments import Segment
from moonserve.transfer.memory.write_windows import LEASE_BYTES
from moonserve.transfer.shm.peer_memory import CHANGED, STEP_BYTES, PeerSegments, ReadableMemory, copy_in_steps
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.tcp.frames import HEADER_BYTES, Header, Kind, encode, request
from moonserve.transfer.tcp.handshake import Agreement
from moonserve.transfer.tcp.session import StreamSession
from moonserve.transfer.transport_interface import Dial, Op, Slice, SliceSource

_LEASED_FROM = 3
"""WRITEs in a row to a window at which a lease of it is asked for."""
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
        self, dial: Dial, connection: Connection, agreed: Agreement, *, markers: Mapping[int, OwnedMemory]
    ) -> None:
        super().__init__(dial, connection, agreed)
        self._max_in_flight = max(self._max_in_flight, _IN_FLIGHT_BYTES)
        self._markers = markers
        self._segments = PeerSegments(connection.peer_pid)
        self._written_segments = PeerSegments(connection.peer_pid, writable=True)
        self._lease = OwnedMemory(LEASE_BYTES)
        self._written: tuple[int | None, int] = None, 0  # the last window, and how many WRITEs in a row
        self._leased: int | None = None
        """The window for which a lease was last asked."""
        max_bytes, lease = dial.options.slice_bytes_over("shm"), address_of(self._lease.view)
        self._inline_route, self._slice_route = (  # `InlineRoute`
            (ctypes.c_int64 * 4)(most, connection.descriptor, self._checksums, lease)
            for most in (min(STEP_BYTES, max_bytes), max_bytes)
        )
        self._copy_natively = self._plane.library.copy_inline
        self._mapping: set[Slice] = set()
        """Slices whose next answer is a mapping or a lease."""
        self._offers: dict[int, _Offer] = {}
        """Offers by local segment id."""
        self._offering: set[Slice] = set()
        """Slices whose answer is preceded by the answer to an offer."""

    def close(self) -> None:
        super().close()
        self._segments.close()
        self._written_segments.close()

    def send_request(self, part: Slice, slices: SliceSource) -> bool:
        if part.op is Op.READ:
            return self._request_read(part, slices)
        window_id, in_a_row = self._written
        self._written = part.window_id, in_a_row + 1 if part.window_id == window_id else 1
        if part.window_id is None or self._written[1] < _LEASED_FROM or self._mapping:
            return super().send_request(part, slices)
        if self._leased != part.window_id:
            return self._ask_for_lease(part) or super().send_request(part, slices)
        return not self._settle_by(self._store, part, slices) and super().send_request(part, slices)

    def _request_write(self, part: Slice) -> None:
        if not self._reachable_for_peer(part):
            super()._request_write(part)
            return
        header = Header(
            kind=Kind.WRITE_FROM,
            entries=len(part.rows),
            segment_id=part.segment_id,
            window_id=part.window_id or 0,
            source_id=part.local.segment_id,
        )
        self._connection.queue(request(header, part.rows))

    def _ask_for_lease(self, part: Slice) -> bool:
        """Sends LEASE for the slice's window. Returns False if that is impossible now."""
        header = Header(kind=Kind.LEASE, segment_id=part.segment_id, window_id=part.window_id or 0)
        if not self._connection.try_send_descriptor(encode(header), self._lease.fd):
            return False
        self._leased = part.window_id
        self._mapping.add(part)
        return True

    def _receive_lease(self, part: Slice) -> bool:
        with suppress(InvalidRequest, StaleLease):  # without a lease the target copies
            self._accept_memory(self._written_segments, part.segment_id)
        stored = self._store(part)
        if not stored:
            self._request_write(part)
        return stored

    def _store(self, part: Slice) -> bool:
        """Stores a slice under the lease. Returns False if the target must copy it. Raises IntegrityError."""
        memory = self._written_segments.get(part.segment_id)
        if type(memory) is not PeerMemory:
            return False
        rows, count = address_of(part.rows), len(part.rows)
        local = part.local.native
        stored = self._copy_natively(self._slice_route, 0, memory.native, local, rows, count, part.window_id)
        if stored < 0:
            raise IntegrityError(CHANGED)
        return bool(stored)

    def receive_reply(self, part: Slice) -> bool:
        if part in self._mapping:
            self._mapping.discard(part)
            return self._receive_map(part) if part.op is Op.READ else self._receive_lease(part)
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
        return not self._settle_by(partial(self._read, source), part, slices)

    def _receive_map(self, part: Slice) -> bool:
        self._accept_memory(self._segments, part.segment_id)
        source = self._segments.get(part.segment_id)
        if source is None:
            header = Header(kind=Kind.READ, entries=len(part.rows), segment_id=part.segment_id)
            self._connection.queue(self.request(header, part.rows))
            return False
        return self._read(source, part)

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

    def _read(self, source: ReadableMemory, part: Slice) -> bool:
        """Copies a slice. Returns True: it has ended. Raises InvalidRequest or IntegrityError."""
        scatter.require_inside(part.rows, REMOTE, source.nbytes)
        copy_in_steps(source, part.local, part.rows, to_column=LOCAL, verified=self._checksums)
        return True

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
        return int(self._copy_natively(self._inline_route, path, memory.native, local.native, rows, count, window))
