"""What travels on a connection: fixed headers, rows, payload. Little-endian, no pickle.

Requests may run ahead; each is answered by exactly one reply, in order (OFFER by none). Anything that
cannot be a frame is a `ProtocolViolation`, after which the connection is closed.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from xxhash import xxh3_64_digest

from protocol.errors import (
    Incompatible,
    IntegrityError,
    InvalidRequest,
    MoonserveError,
    PeerLost,
    StaleLease,
    Unauthenticated,
)
from transfer import scatter
from transfer.plan import MAX_ROWS
from transfer.scatter import Rows
from transfer.tcp.connection import Connection

MAX_TEXT_BYTES = 1024
MAX_LIST_BYTES = 1 << 20
_MAX_PAYLOAD_BYTES = 1 << 40
_SEAL_BYTES = 8
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
    LIST = 6  # → entries of text: JSON of what is readable
    FENCE = 7  # source_id is an earlier connection → answered when nothing of it is served any more
    CONNECT = 8  # queue pairs' addresses → the target's (rdma: see transfer/rdma/control.py)
    KEY = 9  # rows → how to read them, and their checksum (rdma)
    GRANT = 10  # rows and window → how to write them (rdma)
    REPLY = 16
    RESULT = 17  # unasked: how a grant ended (rdma)


class Code(IntEnum):
    """Outcome in a reply and in the handshake."""

    OK = 0
    INVALID_REQUEST = 1
    STALE = 2
    INCOMPATIBLE = 3
    UNAUTHENTICATED = 4
    PEER_LOST = 5
    CORRUPT = 6


_ERRORS: dict[Code, type[MoonserveError]] = {
    Code.INVALID_REQUEST: InvalidRequest,
    Code.STALE: StaleLease,
    Code.INCOMPATIBLE: Incompatible,
    Code.UNAUTHENTICATED: Unauthenticated,
    Code.PEER_LOST: PeerLost,
    Code.CORRUPT: IntegrityError,
}
_KIND_OF = {int(kind): kind for kind in Kind}
_CODE_OF = {int(code): code for code in Code}
_CODES = {error: code for code, error in _ERRORS.items()}


class Header(NamedTuple):
    """A tuple because one is made per frame on the hot path.

    `entries` rows (a request) or bytes of text (a reply) follow, then `nbytes` of payload, whose
    XXH3-64 is `checksum` when the handshake agreed on checksums; READ and WRITE then have a seal of
    8 bytes behind their rows as well.

    A reply to MAP carries the segment's size in `nbytes` and no payload; OFFER likewise.
    """

    kind: Kind
    code: Code = Code.OK
    entries: int = 0
    segment_id: int = 0
    window_id: int = 0
    source_id: int = 0
    nbytes: int = 0
    checksum: int = 0


_HEADER = struct.Struct("<2sBBIQQQQQ")
HEADER_BYTES = _HEADER.size


def encode(header: Header) -> bytes:
    return _HEADER.pack(_MAGIC, *header)


def decode(data: bytes | bytearray) -> Header:
    magic, kind, code, count, *numbers = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise ProtocolViolation("not a frame")
    known_kind, known_code = _KIND_OF.get(kind), _CODE_OF.get(code)
    if known_kind is None or known_code is None:
        raise ProtocolViolation("unknown kind of frame")
    header = Header(known_kind, known_code, count, *numbers)
    limit = MAX_LIST_BYTES if known_kind is Kind.REPLY else MAX_ROWS
    if count > limit or header.nbytes > _MAX_PAYLOAD_BYTES:
        raise ProtocolViolation("oversized frame")
    return header


def request(header: Header, rows: Rows, *, sealed: bool = False) -> bytes:
    """`sealed`: with a checksum of its own, since a wrong row would have right bytes in a wrong place."""
    frame = encode(header) + scatter.pack(rows)
    return frame + xxh3_64_digest(frame) if sealed else frame


def receive_rows(connection: Connection, header: Header, *, sealed: bool = False) -> Rows:
    """Raises ProtocolViolation when the seal does not fit: not even the frame's length can be believed."""
    size = header.entries * scatter.ROW_BYTES
    whole = size + _SEAL_BYTES if sealed else size
    data = connection.receive_short(whole)[:] if header.entries == 1 else connection.receive_bytes(whole)
    if sealed:
        data, seal = data[:size], data[size:]
        if xxh3_64_digest(encode(header) + data) != seal:
            raise ProtocolViolation("a request arrived damaged")
    return scatter.unpack(data)


def refusal(error: MoonserveError) -> bytes:
    """The reply that makes the initiator raise the same error."""
    text = str(error).encode()[:MAX_TEXT_BYTES]
    return encode(Header(kind=Kind.REPLY, code=code_of(error), entries=len(text))) + text


def code_of(error: MoonserveError) -> Code:
    return _CODES.get(type(error), Code.INVALID_REQUEST)


def error_of(code: Code, text: str) -> MoonserveError:
    return _ERRORS[code](text)
