"""The target's side of a connection: it owns the remote memory, checks each request, then stores or sends.

Its rule: bytes are stored only inside an open window, in steps that `close_window` can wait for, and sent only from
readable segments. Serves one connection on its own thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict

from protocol.errors import IntegrityError, InvalidRequest, MoonserveError, PeerLost
from transfer import scatter
from transfer.base import Hosted
from transfer.native import data_plane
from transfer.scatter import LENGTH, REMOTE, Rows
from transfer.segments import Segment
from transfer.tcp.connection import Connection, never
from transfer.tcp.frames import (
    HEADER_BYTES,
    MAX_LIST_BYTES,
    Header,
    Kind,
    ProtocolViolation,
    decode,
    encode,
    receive_rows,
    refusal,
)
from transfer.windows import Window

OK = encode(Header(kind=Kind.REPLY))
_STALL_S = 60.0
"""A peer that stops in the middle of a frame, or accepts no answer, for this long is given up."""
_FENCE_S = 5.0
"""Time limit for ending another connection. Its thread notices after at most one step of a store."""


class StreamTarget:
    """Serves READ and WRITE with the payload on the connection itself."""

    def __init__(self, connection: Connection, hosted: Hosted) -> None:
        self.connection = connection
        self.checksums = False
        """True if slices carry checksums, as agreed in the handshake."""
        self.hosted = hosted
        self._segments = hosted.segments
        self._windows = hosted.windows
        self._plane = data_plane()

    def serve(self) -> None:
        """Serves requests until it raises PeerLost, or ProtocolViolation for invalid input."""
        while True:
            self.next_request()

    def next_request(self) -> None:
        data = self.idle_receive(HEADER_BYTES)
        self.dispatch(decode(data))

    def idle_receive(self, count: int) -> bytearray:
        """Receives the beginning of a request without a deadline and sets the deadline of the rest."""
        self.connection.deadline = never
        data = self.connection.receive_short(count)
        self.connection.set_deadline(time.monotonic() + _STALL_S)
        return data

    def dispatch(self, header: Header) -> None:
        match header.kind:
            case Kind.READ:
                self._read(header)
            case Kind.WRITE:
                self._write(header)
            case Kind.LIST:
                self._list()
            case Kind.FENCE:
                self.answer(lambda: self.hosted.served.end(header.source_id, _FENCE_S))
            case kind:
                raise ProtocolViolation(f"{kind.name} is not for this transport")

    def close(self) -> None:
        """Releases what the peer had mapped here: nothing, on a plain stream."""

    def _read(self, header: Header) -> None:
        rows = receive_rows(self.connection, header, sealed=self.checksums)
        try:
            segment = self.readable(header.segment_id)
            scatter.require_inside(rows, REMOTE, segment.nbytes)
        except MoonserveError as error:
            self.connection.send(refusal(error))
            return
        checksum = scatter.checksum(segment.buffer, rows, REMOTE) if self.checksums else 0
        reply = Header(kind=Kind.REPLY, nbytes=scatter.total(rows), checksum=checksum)
        payload = self._plane.iovecs(segment.base, rows, column=REMOTE)
        self.connection.queue(encode(reply), payload, (segment, payload))
        self.connection.flush()
        if not self._segments.is_registered(segment):
            raise PeerLost("the segment was deregistered while it was read")

    def readable(self, segment_id: int) -> Segment:
        segment = self._segments.find(segment_id)
        if not segment.readable:
            raise InvalidRequest(f"segment {segment_id} is not readable by peers")
        return segment

    def _write(self, header: Header) -> None:
        rows = self.rows_to_write(header)
        try:
            window = self.window_for(header, rows)
        except MoonserveError as error:
            self.connection.discard(header.nbytes)
            self.connection.send(refusal(error))
            return
        self.answer(lambda: self._store(header, rows, window))

    def rows_to_write(self, header: Header) -> Rows:
        """Receives the rows of a WRITE. Raises ProtocolViolation if they do not add up to the header's size."""
        rows = receive_rows(self.connection, header, sealed=self.checksums)
        lengths = rows[:, LENGTH]
        if int(lengths.min(initial=0)) < 0 or sum(lengths.tolist()) != header.nbytes:
            raise ProtocolViolation("size and rows disagree")
        return rows

    def _store(self, header: Header, rows: Rows, window: Window) -> None:
        segment = window.segment
        into = self._plane.iovecs(segment.base, rows, column=REMOTE)
        self.connection.receive_guarded(into, window)
        if self.checksums:
            with window:
                found = scatter.checksum(segment.buffer, rows, REMOTE)
            if found != header.checksum:
                raise IntegrityError(f"{header.nbytes} bytes written arrived with another checksum")

    def window_for(self, header: Header, rows: Rows) -> Window:
        window = self._windows.find(header.window_id, header.segment_id)
        window.require_inside(rows)
        return window

    def _list(self) -> None:
        infos = [asdict(info) for info in self._segments.infos() if info.readable]
        text = json.dumps(infos).encode()
        if len(text) > MAX_LIST_BYTES:
            self.connection.send(refusal(InvalidRequest("too many segments to list")))
            return
        self.connection.send(encode(Header(kind=Kind.REPLY, entries=len(text))) + text)

    def answer(self, work: Callable[[], None]) -> None:
        """Runs `work` and replies with its outcome. Sends no reply if the connection broke."""
        try:
            work()
        except PeerLost:
            raise
        except MoonserveError as error:
            self.connection.send(refusal(error))
        else:
            self.connection.send(OK)
