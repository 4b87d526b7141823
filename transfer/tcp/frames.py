"""Wire format of a connection: fixed headers, rows, payload. Little-endian, no pickle.

Requests may be pipelined. Each gets exactly one reply, in order; OFFER of mapped memory gets none. Bytes that are no
frame raise `ProtocolViolation`, after which the connection is closed.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

from xxhash import xxh3_64_digest

from moonserve.protocol.errors import (
    Incompatible,
    IntegrityError,
    InvalidRequest,
    MoonserveError,
    PeerLost,
    StaleLease,
    Unauthenticated,
)
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import SEAL_BYTES
from moonserve.transfer.memory.scatter import MAX_ROWS, Rows
from moonserve.transfer.tcp.connection import Connection

MAX_TEXT_BYTES = 1024
MAX_LIST_BYTES = 1 << 20
_MAX_PAYLOAD_BYTES = 1 << 40
_MAGIC = b"MT"


class ProtocolViolation(PeerLost):
    """Received bytes are not a frame of this protocol. Their sender is no longer treated as a peer."""

    code = "transfer_protocol"


class Kind(IntEnum):
    READ = 1  # rows → REPLY with their bytes as payload
    WRITE = 2  # rows and payload → stored through a window
    MAP = 3  # → REPLY with the segment's memfd and size (same host)
    OFFER = 4  # memory of the initiator for later WRITE_FROM (same host); REPLY only if it is process memory
    WRITE_FROM = 5  # rows → the target copies from the offered memory (same host)
    LIST = 6  # → REPLY with `entries` bytes of JSON text: the readable segments
    FENCE = 7  # source_id is an earlier connection → REPLY when nothing of it is served any more
    CONNECT = 8  # queue pairs' addresses → the target's (rdma: see transfer/rdma/control_messages.py)
    KEY = 9  # rows → REPLY with the key to read them and their checksum (rdma)
    GRANT = 10  # rows and window → REPLY with the key to write them (rdma)
    LEASE = 11  # window, page of the lease → REPLY with the window's memory, to be written under the lease (same host)
    REPLY = 16
    RESULT = 17  # unsolicited: outcome of a grant (rdma)


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
    """Frame header; a tuple because one is made per frame on the hot path.

    It is followed by `entries` rows (request) or bytes of text (reply), then `nbytes` of payload. If the handshake
    agreed on checksums, 8-byte seals follow the rows of READ and WRITE and each payload: their XXH3-64. `checksum` is
    that of bytes that do not pass through the connection (rdma).

    A reply to MAP, and OFFER, carry the segment's size in `nbytes` and no payload.
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
        raise ProtocolViolation("the received bytes are not a frame")
    known_kind, known_code = _KIND_OF.get(kind), _CODE_OF.get(code)
    if known_kind is None or known_code is None:
        raise ProtocolViolation("a frame has an unknown kind or code")
    header = Header(known_kind, known_code, count, *numbers)
    limit = MAX_LIST_BYTES if known_kind is Kind.REPLY else MAX_ROWS
    if count > limit or header.nbytes > _MAX_PAYLOAD_BYTES:
        raise ProtocolViolation("a frame is too large")
    return header


def request(header: Header, rows: Rows, *, sealed: bool = False) -> bytes:
    """Encodes a request. `sealed` appends its checksum, since a damaged row would put right bytes in a wrong place."""
    frame = encode(header) + scatter.pack(rows)
    return frame + xxh3_64_digest(frame) if sealed else frame


def receive_rows(connection: Connection, header: Header, *, sealed: bool = False) -> Rows:
    """Receives a request's rows. Raises ProtocolViolation if the seal is wrong."""
    data = connection.receive_bytes(header.entries * scatter.ROW_BYTES + SEAL_BYTES * sealed)
    return unpack_rows(header, data, sealed=sealed)


def unpack_rows(header: Header, data: bytes | bytearray, *, sealed: bool) -> Rows:
    """Unpacks a request's rows. Raises ProtocolViolation if the seal behind them is wrong: not even the frame's length
    is reliable then."""
    if sealed:
        data, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
        if xxh3_64_digest(encode(header) + data) != seal:
            raise ProtocolViolation("a request has a wrong checksum")
    return scatter.unpack(data)


def refusal(error: MoonserveError) -> bytes:
    """Encodes the reply that makes the initiator raise the same error."""
    text = str(error).encode()[:MAX_TEXT_BYTES]
    return encode(Header(kind=Kind.REPLY, code=code_of(error), entries=len(text))) + text


def code_of(error: MoonserveError) -> Code:
    return _CODES.get(type(error), Code.INVALID_REQUEST)


def error_of(code: Code, text: str) -> MoonserveError:
    return _ERRORS[code](text)
