"""The `shm` transport: peers under one kernel, who map each other's memory read-only.

READ: the initiator copies out of the peer's memory itself. WRITE: the target copies out of the
initiator's, after its checks. The Unix socket carries requests and descriptors; memory that is no
memfd takes the stream's way over the same socket.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable

from protocol.errors import ConfigError, InvalidRequest, MoonserveError, PeerLost
from transfer import scatter
from transfer.acceptor import Acceptor
from transfer.address import Address, host_identity
from transfer.base import Dial, Hosted, Move
from transfer.connection import Connection
from transfer.frames import (
    HEADER_BYTES,
    Header,
    Kind,
    ProtocolViolation,
    accept_reply,
    decode,
    encode,
    receive_rows,
    refusal,
    request,
)
from transfer.memfd import PeerMemory
from transfer.stream import StreamSession, authenticate, window_of
from transfer.target import StreamTarget

_STEP_BYTES = 4 << 20
"""A store of this size is under way for about a millisecond, the longest that close_window waits."""

_BACKLOG_S = 0.5
"""How long to wait for a peer that does not take connections (stopped, or flooded)."""


class ShmTransport:
    name = "shm"

    def listen(self, host: str, hosted: Hosted) -> Acceptor:
        name = f"moonserve-{hosted.credentials.instance.hex()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{name}")
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on the abstract socket {name}: {error}") from error

        def target(sock: socket.socket) -> ShmTarget:
            return ShmTarget(Connection(sock), hosted)

        return Acceptor(listener, name, hosted.credentials, target)

    def reachable(self, address: Address) -> bool:
        return self.name in address.endpoints and address.host == host_identity()

    def connect(self, dial: Dial) -> ShmSession:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Blocks only while the peer's backlog is full; a non-blocking connect could not wait.
            left_s = min(dial.deadline_at - time.monotonic(), _BACKLOG_S)
            timeout = struct.pack("@ll", 0, max(1, int(left_s * 1e6)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            sock.connect("\0" + dial.address.endpoints[self.name])
        except OSError as error:
            sock.close()
            raise PeerLost(f"cannot connect over shm: {error}") from error
        connection = Connection(sock)
        authenticate(connection, dial)
        return ShmSession(self.name, connection)


class ShmSession(StreamSession):
    """Adds the peer's mapped memory and what of ours the peer has been offered."""

    def __init__(self, transport: str, connection: Connection) -> None:
        super().__init__(transport, connection)
        self._mapped: dict[int, PeerMemory | None] = {}
        self._offered: set[int] = set()

    def read(self, move: Move) -> None:
        memory = self._map(move.segment_id)
        if memory is None:
            super().read(move)
            return
        for remote, _, length in move.rows:
            if remote < 0 or length > memory.nbytes - remote:
                raise InvalidRequest(f"out of bounds of a segment of {memory.nbytes} bytes")
        places = ((local, remote, length) for remote, local, length in move.rows)
        scatter.copy(move.local.buffer, memory.view, places)
        memory.require_live()  # after the copy: what was copied counts

    def write(self, move: Move, *, corrupt: bool) -> None:
        source = move.local
        if source.memory is None or corrupt:
            super().write(move, corrupt=corrupt)
            return
        if source.segment_id not in self._offered:
            offer = Header(kind=Kind.OFFER, source_id=source.segment_id, nbytes=source.nbytes)
            self._connection.send([encode(offer)], source.memory.fd)
            self._offered.add(source.segment_id)
        header = Header(
            kind=Kind.WRITE_FROM,
            entries=len(move.rows),
            segment_id=move.segment_id,
            window_id=window_of(move),
            source_id=source.segment_id,
        )
        self._connection.send([request(header, move.rows)])
        self.reply()

    def close(self) -> None:
        super().close()
        _close_all(self._mapped.values())
        self._mapped.clear()

    def _map(self, segment_id: int) -> PeerMemory | None:
        """None: the peer's segment is readable but only over the stream."""
        memory = self._mapped.get(segment_id)
        if memory is None and segment_id not in self._mapped:
            _drop_dead(self._mapped)
            memory = self._mapped[segment_id] = self._ask_for(segment_id)
        return memory

    def _ask_for(self, segment_id: int) -> PeerMemory | None:
        self._connection.send([encode(Header(kind=Kind.MAP, segment_id=segment_id))])
        data, fd = self._connection.receive_with_fd(HEADER_BYTES)
        try:
            reply = accept_reply(self._connection, data)
            return None if fd is None else PeerMemory(fd, reply.nbytes)
        finally:
            if fd is not None:
                os.close(fd)


class ShmTarget(StreamTarget):
    """Adds lending this engine's memory and copying out of the initiator's."""

    def __init__(self, connection: Connection, hosted: Hosted) -> None:
        super().__init__(connection, hosted)
        self._offered: dict[int, PeerMemory | None] = {}

    def serve(self) -> None:
        while True:
            data, fd = self.connection.receive_with_fd(HEADER_BYTES)
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

    def close(self) -> None:
        _close_all(self._offered.values())
        self._offered.clear()

    def _lend(self, header: Header) -> None:
        try:
            segment = self.readable(header.segment_id)
        except MoonserveError as error:
            self.connection.send([refusal(error)])
            return
        reply = encode(Header(kind=Kind.REPLY, nbytes=segment.nbytes))
        self.connection.send([reply], segment.memory.fd if segment.memory else None)

    def _accept_offer(self, header: Header, fd: int | None) -> None:
        if fd is None or header.source_id in self._offered:
            raise ProtocolViolation("an offer without memory, or twice")
        _drop_dead(self._offered)
        self._offered[header.source_id] = PeerMemory(fd, header.nbytes)

    def _write_from(self, header: Header) -> None:
        rows = receive_rows(self.connection, header)
        if self.connection.hung_up():
            raise PeerLost("the initiator gave up")
        self.answer(lambda: self._copy_from(header, rows))

    def _copy_from(self, header: Header, rows: scatter.Rows) -> None:
        window = self.window_for(header, rows)
        source = self._offered.get(header.source_id)
        if source is None:
            raise InvalidRequest(f"segment {header.source_id} of the initiator was never offered")
        scatter.require_inside(rows, scatter.LOCAL, source.nbytes)
        into = window.segment.buffer
        for group in scatter.chunks(rows.tolist(), _STEP_BYTES):
            with window:
                scatter.copy(into, source.view, group)
        source.require_live()


def _drop_dead(memories: dict[int, PeerMemory | None]) -> None:
    """Unmaps what its owner has deregistered, so that its pages can go."""
    for segment_id, memory in list(memories.items()):
        if memory is not None and not memory.live:
            memory.close()
            del memories[segment_id]


def _close_all(memories: Iterable[PeerMemory | None]) -> None:
    for memory in memories:
        if memory is not None:
            memory.close()
