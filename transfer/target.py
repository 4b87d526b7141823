"""The side that owns the remote memory: checks each request, then stores or sends.

Its rule: nothing is stored but inside an open window, in steps that `close_window` can wait for, and
nothing is sent but from segments marked readable. Serves one connection on its own thread.
"""

from __future__ import annotations

from collections.abc import Callable

from protocol.errors import InvalidRequest, MoonserveError, PeerLost
from transfer import scatter
from transfer.base import Hosted
from transfer.connection import Connection
from transfer.frames import (
    HEADER_BYTES,
    Header,
    Kind,
    ProtocolViolation,
    decode,
    encode,
    receive_rows,
    refusal,
)
from transfer.segments import Segment
from transfer.windows import Window

_OK = encode(Header(kind=Kind.REPLY))


class StreamTarget:
    """READ and WRITE with the payload on the connection itself."""

    def __init__(self, connection: Connection, hosted: Hosted) -> None:
        self.connection = connection
        self._segments = hosted.segments
        self._windows = hosted.windows

    def serve(self) -> None:
        """Until the peer is gone: raises PeerLost, or ProtocolViolation when it talks nonsense."""
        while True:
            self.dispatch(decode(self.connection.receive_bytes(HEADER_BYTES)))

    def dispatch(self, header: Header) -> None:
        match header.kind:
            case Kind.READ:
                self._read(header)
            case Kind.WRITE:
                self._write(header)
            case kind:
                raise ProtocolViolation(f"{kind.name} is not for this transport")

    def close(self) -> None:
        """Gives back what the connection's peer had mapped here: nothing, on a plain stream."""

    def _read(self, header: Header) -> None:
        rows = receive_rows(self.connection, header)
        try:
            segment = self.readable(header.segment_id)
            scatter.require_inside(rows, scatter.REMOTE, segment.nbytes)
        except MoonserveError as error:
            self.connection.send([refusal(error)])
            return
        payload = scatter.views(segment.buffer, rows[:, ::2].tolist())
        nbytes = sum(view.nbytes for view in payload)
        self.connection.send([encode(Header(kind=Kind.REPLY, nbytes=nbytes)), *payload])
        if not self._segments.is_registered(segment):
            raise PeerLost("the segment was deregistered while it was read")

    def readable(self, segment_id: int) -> Segment:
        segment = self._segments.find(segment_id)
        if not segment.readable:
            raise InvalidRequest(f"segment {segment_id} is not readable by peers")
        return segment

    def _write(self, header: Header) -> None:
        rows = receive_rows(self.connection, header)
        lengths = rows[:, scatter.LENGTH].tolist()
        if min(lengths, default=0) < 0 or sum(lengths) != header.nbytes:
            raise ProtocolViolation("payload and rows disagree")
        try:
            window = self.window_for(header, rows)
        except MoonserveError as error:
            self.connection.discard(header.nbytes)
            self.connection.send([refusal(error)])
            return
        places = scatter.views(window.segment.buffer, rows[:, ::2].tolist())
        self.answer(lambda: self.connection.receive(places, window))

    def window_for(self, header: Header, rows: scatter.Rows) -> Window:
        window = self._windows.find(header.window_id, header.segment_id)
        window.require_inside(rows)
        return window

    def answer(self, work: Callable[[], None]) -> None:
        """Does the work and says how it ended. A broken connection needs no answer."""
        try:
            work()
        except PeerLost:
            raise
        except MoonserveError as error:
            self.connection.send([refusal(error)])
        else:
            self.connection.send([_OK])
