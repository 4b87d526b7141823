"""The target over shared memory: lends this engine's memory, and stores what the initiator offered.

Its rule is the stream's: nothing is stored but inside an open window. Peers can map memory for
reading only, so a WRITE is a copy that this side makes, after its checks.
"""

from __future__ import annotations

import os

from protocol.errors import InvalidRequest, MoonserveError, PeerLost
from transfer import scatter
from transfer.base import Hosted
from transfer.rows import LOCAL, REMOTE, Rows
from transfer.shm.copying import Copier
from transfer.shm.markers import Markers
from transfer.shm.sources import Sources
from transfer.wire.connection import Connection
from transfer.wire.frames import (
    HEADER_BYTES,
    Header,
    Kind,
    ProtocolViolation,
    decode,
    encode,
    receive_rows,
    refusal,
)
from transfer.wire.target import StreamTarget

_MAX_OFFERS = 4096
"""Segments that one peer may have mapped here at a time."""


class ShmTarget(StreamTarget):
    """Serves one connection on its own thread."""

    def __init__(
        self, connection: Connection, hosted: Hosted, *, copier: Copier, markers: Markers
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
        """The memory itself, or a marker and where it lies in this process."""
        try:
            segment = self.readable(header.segment_id)
        except MoonserveError as error:
            self.connection.send(refusal(error))
            return
        lent = segment.memory or self._markers.of(segment)
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
        self._copier.copy(
            source, window.segment, rows, to_column=REMOTE, verified=self.checksums, guard=window
        )
