"""The initiator's side of a connection whose payload travels on the connection itself."""

from __future__ import annotations

from protocol.errors import InvalidRequest
from transfer import handshake, scatter
from transfer.base import Dial, Move
from transfer.connection import Connection
from transfer.frames import HEADER_BYTES, Header, Kind, ProtocolViolation, accept_reply, request


class StreamSession:
    """A `base.Session` over one stream socket."""

    def __init__(self, transport: str, connection: Connection) -> None:
        self.transport = transport
        self._connection = connection

    def alive(self) -> bool:
        return not self._connection.hung_up()

    def begin(self, deadline_at: float) -> None:
        """What follows must have ended by then."""
        self._connection.deadline_at = deadline_at

    def abort(self) -> None:
        self._connection.abort()

    def close(self) -> None:
        self._connection.close()

    def read(self, move: Move) -> None:
        nbytes = scatter.total(move.rows)
        header = Header(kind=Kind.READ, entries=len(move.rows), segment_id=move.segment_id)
        self._connection.send([request(header, move.rows)])
        if self.reply().nbytes != nbytes:
            raise ProtocolViolation("the peer answers with another number of bytes")
        self._connection.receive(_local_views(move))

    def write(self, move: Move, *, corrupt: bool) -> None:
        header = Header(
            kind=Kind.WRITE,
            entries=len(move.rows),
            segment_id=move.segment_id,
            window_id=window_of(move),
            nbytes=scatter.total(move.rows),
        )
        payload: list[bytes | memoryview] = [*_local_views(move)]
        if corrupt and payload:
            payload[:1] = [bytes([payload[0][0] ^ 0xFF]), payload[0][1:]]
        self._connection.send([request(header, move.rows), *payload])
        self.reply()

    def reply(self) -> Header:
        return accept_reply(self._connection, self._connection.receive_bytes(HEADER_BYTES))


def window_of(move: Move) -> int:
    if move.window_id is None:
        raise InvalidRequest("a WRITE needs a window")
    return move.window_id


def _local_views(move: Move) -> list[memoryview]:
    places = ((local, length) for _, local, length in move.rows)
    return scatter.views(move.local.buffer, places)


def authenticate(connection: Connection, dial: Dial) -> None:
    """The initiator's handshake. The connection is closed when it fails."""
    connection.deadline_at = dial.deadline_at
    connection.while_waiting = dial.while_waiting
    try:
        connection.finish_connect()
        handshake.initiate(connection, dial.credentials, dial.address.instance)
    except BaseException:
        connection.close()
        raise
