"""What travels on a connection: fixed headers, rows, payload. Little-endian, no pickle.

One request at a time per connection, each answered by exactly one reply. Anything that cannot be a
frame is a `ProtocolViolation`, after which the connection is closed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from protocol.errors import (
    Incompatible,
    InvalidRequest,
    MoonserveError,
    PeerLost,
    StaleLease,
    Unauthenticated,
)
from transfer import scatter
from transfer.base import Row
from transfer.connection import Connection

MAX_ROWS = 4096
"""Bounds what a peer can make the other side hold: 96 KiB of rows per frame."""
_MAX_TEXT_BYTES = 1024
_MAGIC = b"MT"


class ProtocolViolation(PeerLost):
    """What arrived is not a frame of this protocol; whoever sent it is no peer any more."""

    code = "transfer_protocol"


class Kind(IntEnum):
    READ = 1  # rows → their bytes as payload of the reply
    WRITE = 2  # rows and payload → stored through a window
    MAP = 3  # → the segment's memfd and its size (same host)
    OFFER = 4  # a memfd of the initiator's, for later WRITE_FROM (same host); no reply
    WRITE_FROM = 5  # rows → the target copies from the offered memory (same host)
    REPLY = 16


class Code(IntEnum):
    """Outcome in a reply and in the handshake."""

    OK = 0
    INVALID_REQUEST = 1
    STALE = 2
    INCOMPATIBLE = 3
    UNAUTHENTICATED = 4
    PEER_LOST = 5


_ERRORS: dict[Code, type[MoonserveError]] = {
    Code.INVALID_REQUEST: InvalidRequest,
    Code.STALE: StaleLease,
    Code.INCOMPATIBLE: Incompatible,
    Code.UNAUTHENTICATED: Unauthenticated,
    Code.PEER_LOST: PeerLost,
}
_KIND_OF = {int(kind): kind for kind in Kind}
_CODE_OF = {int(code): code for code in Code}
_CODES = {error: code for code, error in _ERRORS.items()}


class Header(NamedTuple):
    """A tuple because one is made per frame on the hot path.

    `entries` rows (a request) or bytes of text (a reply) follow, then `nbytes` of payload.

    A reply to MAP carries the segment's size in `nbytes` and no payload; OFFER likewise.
    """

    kind: Kind
    code: Code = Code.OK
    entries: int = 0
    segment_id: int = 0
    window_id: int = 0
    source_id: int = 0
    nbytes: int = 0


_HEADER = struct.Struct("<2sBBIQQQQ")
HEADER_BYTES = _HEADER.size


def encode(header: Header) -> bytes:
    return _HEADER.pack(_MAGIC, *header)


def decode(data: bytes | bytearray) -> Header:
    magic, kind, code, count, segment_id, window_id, source_id, nbytes = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise ProtocolViolation("not a frame")
    known_kind, known_code = _KIND_OF.get(kind), _CODE_OF.get(code)
    if known_kind is None or known_code is None:
        raise ProtocolViolation("unknown kind of frame")
    if count > (_MAX_TEXT_BYTES if known_kind is Kind.REPLY else MAX_ROWS):
        raise ProtocolViolation("oversized frame")
    return Header(known_kind, known_code, count, segment_id, window_id, source_id, nbytes)


def request(header: Header, rows: Sequence[Row] = ()) -> bytes:
    return encode(header) + scatter.pack(rows)


def receive_rows(connection: Connection, header: Header) -> scatter.Rows:
    return scatter.unpack(connection.receive_bytes(header.entries * scatter.ROW_BYTES))


def refusal(error: MoonserveError) -> bytes:
    """The reply that makes the initiator raise the same error."""
    text = str(error).encode()[:_MAX_TEXT_BYTES]
    code = _CODES.get(type(error), Code.INVALID_REQUEST)
    return encode(Header(kind=Kind.REPLY, code=code, entries=len(text))) + text


def accept_reply(connection: Connection, data: bytes | bytearray) -> Header:
    """The reply whose header is `data`. Raises what the peer refused with."""
    reply = decode(data)
    if reply.kind is not Kind.REPLY:
        raise ProtocolViolation(f"a reply was due, {reply.kind.name} came")
    if reply.code is not Code.OK:
        raise error_of(reply.code, connection.receive_bytes(reply.entries).decode(errors="replace"))
    return reply


def error_of(code: Code, text: str) -> MoonserveError:
    return _ERRORS[code](text)
