"""The initiator's side of shm: READs copy out of the peer's memory, WRITEs offer local memory to the peer.

Memory that cannot be reached directly is sent over the same socket as a stream. Its rule: a descriptor is passed only
when that cannot block, since the peer may be sending answers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum, auto

from protocol.errors import IntegrityError, InvalidRequest, PeerLost
from transfer import scatter
from transfer.base import Dial, Feed, Op, Slice, Transfer
from transfer.scatter import LOCAL, REMOTE
from transfer.segments import Segment
from transfer.shm.copying import STEP_BYTES, Copier, Source, copy_step
from transfer.shm.memfd import OwnedMemory, PeerMemory
from transfer.shm.sources import Sources
from transfer.tcp.connection import Connection
from transfer.tcp.frames import HEADER_BYTES, Header, Kind, encode, request
from transfer.tcp.handshake import Agreement
from transfer.tcp.session import StreamSession, without_frames

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
        copier: Copier,
        markers: Mapping[int, OwnedMemory],
    ) -> None:
        super().__init__(dial, connection, agreed)
        self._max_in_flight = max(self._max_in_flight, _IN_FLIGHT_BYTES)
        self._copier = copier
        self._markers = markers
        self._sources = Sources(connection.peer_pid)
        self._mapping: set[Slice] = set()
        """Slices whose next answer is a mapping."""
        self._offers: dict[int, _Offer] = {}
        """Offers by local segment id."""
        self._offering: set[Slice] = set()
        """Slices whose answer is preceded by the answer to an offer."""

    def close(self) -> None:
        super().close()
        self._sources.close()

    def ask(self, part: Slice, feed: Feed) -> bool:
        if part.op is Op.READ:
            return self._ask_read(part, feed)
        if part.window_id is None or not self._reachable_for_peer(part):
            return super().ask(part, feed)
        header = Header(
            kind=Kind.WRITE_FROM,
            entries=len(part.rows),
            segment_id=part.segment_id,
            window_id=part.window_id,
            source_id=part.local.segment_id,
        )
        self._connection.queue(request(header, part.rows))
        return True

    def answer(self, part: Slice) -> bool:
        if part in self._mapping:
            self._mapping.discard(part)
            return self._answer_with_map(part)
        if part in self._offering:
            self._offering.discard(part)
            taken = self.reply().nbytes
            self._offers[part.local.segment_id] = _Offer.TAKEN if taken else _Offer.REFUSED
        return super().answer(part)

    def _ask_read(self, part: Slice, feed: Feed) -> bool:
        if part.segment_id not in self._sources:
            self._connection.queue(encode(Header(kind=Kind.MAP, segment_id=part.segment_id)))
            self._mapping.add(part)
            return True
        source = self._sources.get(part.segment_id)
        if source is None:
            return super().ask(part, feed)
        if not self.alive():  # a copy alone would not fail
            raise PeerLost("the peer is gone")
        try:
            self._read(part, source)
        except (InvalidRequest, IntegrityError) as error:
            feed.settle(part, without_frames(error))
        else:
            feed.settle(part, None)
        return False

    def _answer_with_map(self, part: Slice) -> bool:
        self._accept_map(part.segment_id)
        source = self._sources.get(part.segment_id)
        if source is None:
            header = Header(kind=Kind.READ, entries=len(part.rows), segment_id=part.segment_id)
            self._connection.queue(self.request(header, part.rows))
            return False
        self._read(part, source)
        return True

    def _accept_map(self, segment_id: int) -> None:
        """Receives the answer to MAP. Raises InvalidRequest if the peer lends no such memory."""
        data = self._connection.receive_bytes(HEADER_BYTES)
        fd = self._connection.take_descriptor()
        try:
            reply = self.accept(data)
            if segment_id not in self._sources:
                self._sources.add(segment_id, fd, reply.source_id, reply.nbytes)
        finally:
            if fd is not None:
                os.close(fd)

    def _read(self, part: Slice, source: Source) -> None:
        scatter.require_inside(part.rows, REMOTE, source.nbytes)
        self._copier.copy(source, part.local, part.rows, to_column=LOCAL, verified=self._checksums)

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
        lent = segment.memory or self._markers.get(segment.segment_id)
        if lent is None:
            return False
        offer = Header(
            kind=Kind.OFFER,
            source_id=segment.segment_id,
            window_id=0 if segment.memory else segment.base,
            nbytes=segment.nbytes,
        )
        return self._connection.pass_at_once(encode(offer), lent.lent_fd)

    def view(self, segment_id: int, offset: int, length: int, deadline_at: float) -> memoryview:
        if segment_id not in self._sources:
            self._connection.set_deadline(deadline_at)
            self._connection.send(encode(Header(kind=Kind.MAP, segment_id=segment_id)))
            self._accept_map(segment_id)
        source = self._sources.get(segment_id)
        if not isinstance(source, PeerMemory):
            raise InvalidRequest("memory that its owner did not allocate cannot be viewed: READ it")
        source.require_live()
        if offset < 0 or length < 0 or length > source.nbytes - offset:
            raise InvalidRequest(f"out of bounds of a segment of {source.nbytes} bytes")
        return source.view[offset : offset + length]

    def read_here(self, transfer: Transfer, deadline_at: float) -> bool:
        """Copies a small READ out of known memory without a request. Returns False if it cannot."""
        source = self._sources.get(transfer.remote.segment_id)
        start, to, length = transfer.remote_offset, transfer.local_offset, transfer.length
        if source is None or not 0 <= length <= STEP_BYTES:
            return False
        if to < 0 or to + length > transfer.local.nbytes:
            return False  # `carry` reports the error
        row = scatter.rows((start, to, length))
        scatter.require_inside(row, REMOTE, source.nbytes)
        copy_step(source, transfer.local, row, LOCAL, self._checksums)
        source.require_live()  # after the copy, so that the copy is covered
        return True
