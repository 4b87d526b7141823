"""The target's side of connections: accepts them (one thread accepts, one thread per peer serves), checks each request,
then stores or sends.

Its rules: bytes are stored only inside an open window, in steps that `close_window` can wait for, and sent only from
readable segments. A peer that does not authenticate within the handshake's time limit is dropped, and unauthenticated
peers cannot take more than `_MAX_CONNECTIONS` threads.
"""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from moonserve.protocol.errors import InvalidRequest, MoonserveError, PeerLost
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import SEAL_BYTES
from moonserve.transfer.memory.scatter import LENGTH, REMOTE, Rows
from moonserve.transfer.memory.segments import Segment
from moonserve.transfer.memory.write_windows import Window
from moonserve.transfer.paths.peer_address import Rail
from moonserve.transfer.tcp import handshake
from moonserve.transfer.tcp.connection import Connection, no_deadline
from moonserve.transfer.tcp.frames import (
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
from moonserve.transfer.transport_interface import ServedState

_log = logging.getLogger(__name__)

OK = encode(Header(kind=Kind.REPLY))
STALL_S = 60.0
"""A peer that stops in the middle of a frame, or accepts no answer, for this long is given up."""
_FENCE_S = 5.0
"""Time limit for ending another connection. Its thread notices after at most one step of a store."""


class StreamTarget:
    """Serves one connection on its own thread: READ and WRITE with the payload on the connection itself."""

    def __init__(self, connection: Connection, state: ServedState) -> None:
        self.connection = connection
        self.checksums = False
        """True if slices carry checksums, as agreed in the handshake."""
        self.state = state
        self._segments = state.segments
        self._windows = state.windows

    def serve(self) -> None:
        """Serves requests until it raises PeerLost, or ProtocolViolation for invalid input."""
        while True:
            self.next_request()

    def next_request(self) -> None:
        self.dispatch(decode(self.idle_receive(HEADER_BYTES)))

    def idle_receive(self, count: int) -> bytearray:
        """Receives the beginning of a request without a deadline and sets the deadline of the rest."""
        self.connection.deadline = no_deadline
        data = self.connection.receive_bytes(count)
        self.connection.set_deadline(time.monotonic() + STALL_S)
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
                self.reply_with_outcome(lambda: self.state.served.end(header.source_id, _FENCE_S))
            case kind:
                raise ProtocolViolation(f"this transport does not support {kind.name}")

    def close(self) -> None:
        """Releases what the peer had mapped here: nothing, on a plain stream."""

    def _read(self, header: Header) -> None:
        rows = self.receive_rows(header)
        try:
            segment = self.readable(header.segment_id)
            scatter.require_inside(rows, REMOTE, segment.nbytes)
        except MoonserveError as error:
            self.connection.send(refusal(error))
            return
        nbytes = scatter.total(rows)
        reply = encode(Header(kind=Kind.REPLY, nbytes=nbytes))
        self.connection.queue_payload(reply, segment, rows, REMOTE, nbytes)
        self.connection.flush()
        if not self._segments.is_registered(segment):
            raise PeerLost("the segment was deregistered while it was read")

    def receive_rows(self, header: Header) -> Rows:
        """Receives a request's rows. Raises ProtocolViolation."""
        return receive_rows(self.connection, header, sealed=self.checksums)

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
            self.connection.discard(header.nbytes + (SEAL_BYTES if self.checksums else 0))
            self.connection.send(refusal(error))
            return
        receive = self.connection.receive_payload
        self.reply_with_outcome(lambda: receive(window.segment, rows, REMOTE, header.nbytes, window))

    def rows_to_write(self, header: Header) -> Rows:
        """Receives the rows of a WRITE. Raises ProtocolViolation if they do not add up to the header's size."""
        rows = self.receive_rows(header)
        lengths = rows[:, LENGTH]
        if int(lengths.min(initial=0)) < 0 or sum(lengths.tolist()) != header.nbytes:
            raise ProtocolViolation("the sizes of header and rows differ")
        return rows

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

    def reply_with_outcome(self, work: Callable[[], None]) -> None:
        """Runs `work` and replies with its outcome. Sends no reply if the connection broke."""
        try:
            work()
        except PeerLost:
            raise
        except MoonserveError as error:
            self.connection.send(refusal(error))
        else:
            self.connection.send(OK)


_HANDSHAKE_S = 5.0
"""Time limit of the handshake on this side. A connection that has not authenticated by then is closed, since it takes
one of `_MAX_CONNECTIONS` threads. No call is limited by it: a dialling peer waits until its own deadline, however long
this process is stopped."""
_MAX_CONNECTIONS = 1024


class Acceptor:
    """Serves peers on one published rail until closed. Owns the listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        rail: Rail,
        state: ServedState,
        make_target: Callable[[socket.socket], StreamTarget],
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts accepting. `make_target` creates the handler of an accepted socket; `on_closed` ends what the handlers
        use."""
        self.rail = rail
        self._listener = listener
        self._state = state
        self._make_target = make_target
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._serving: dict[Connection, threading.Thread] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"transfer-accept {rail.endpoint}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):  # already closed
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            serving = dict(self._serving)
        for connection in serving:
            connection.abort()
        for thread in serving.values():
            thread.join()
        self._on_closed()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closed.wait(0.1):  # out of descriptors: give others time to close
                    _log.warning("cannot accept a connection: %s", error)
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        with self._lock:
            if len(self._serving) >= _MAX_CONNECTIONS:
                _log.warning("refused a connection: %d are open on %s", _MAX_CONNECTIONS, self.rail.endpoint)
                sock.close()
                return
            try:
                target = self._make_target(sock)
            except OSError:  # the peer already hung up, so the socket has no peer address
                sock.close()
                return
            thread = threading.Thread(target=self._serve, args=(target,), name="transfer-target", daemon=True)
            self._serving[target.connection] = thread
            try:
                thread.start()
            except RuntimeError as error:  # the process may not start more threads
                _log.warning("cannot serve a connection: %s", error)
                del self._serving[target.connection]
                sock.close()

    def _serve(self, target: StreamTarget) -> None:
        connection = target.connection
        served = self._state.served.add(connection.abort)
        try:
            connection.set_deadline(time.monotonic() + _HANDSHAKE_S)
            agreed = handshake.respond(
                connection,
                self._state.credentials,
                served.connection_id,
                checksums=self._state.options.checksums,
            )
            target.checksums = connection.seals = agreed.checksums
            target.serve()
        except MoonserveError as error:
            level = logging.DEBUG if type(error) is PeerLost else logging.WARNING
            _log.log(level, "connection to %s ended: %s", self.rail.endpoint, error)
        finally:
            connection.close()
            target.close()
            self._state.served.remove(served)
            with self._lock:
                del self._serving[connection]
