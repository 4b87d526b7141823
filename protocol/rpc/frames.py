"""Frame format of socket RPC after the handshake. All integers are little-endian.

request  length u32 · call id u32 · method u32 · deadline in ms u32 · payload
reply    length u32 · call id u32 · status u8 · payload

The length counts the bytes after itself. A method is its index in the server's list from the handshake; `CANCEL` in its
place cancels the call with that id. A reply's payload is the reply message or a `common.Failure`. A stream is any
number of replies with status MORE, then one that ends the call. An impossible length is refused before memory is
allocated for it. The module knows no sockets and no messages.
"""

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

from moonserve.protocol.errors import InvalidRequest, PeerLost

# A message must be able to hold a prompt of a million tokens.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CANCEL = 0xFFFF_FFFF
MAX_DEADLINE_MS = 0xFFFF_FFFF
MAX_CALL_ID = 0xFFFF_FFFF

LENGTH = struct.Struct("<I")
REQUEST = struct.Struct("<IIII")
REPLY = struct.Struct("<IIB")


class MalformedFrame(PeerLost):
    """The received bytes are not a frame of this protocol. The connection is unusable."""


class Status(IntEnum):
    OK = 0
    FAILURE = 1
    MORE = 2


class Request(NamedTuple):
    call_id: int
    method: int
    deadline_ms: int
    payload: bytes


class Reply(NamedTuple):
    call_id: int
    status: int
    payload: bytes


Frame = TypeVar("Frame", Request, Reply)


def request(call_id: int, method: int, timeout_s: float, payload: bytes) -> bytes:
    """Returns the frame of a call. Raises InvalidRequest if the payload is above the limit."""
    check_size(payload)
    # Rounded up, because the server must not time out before the caller.
    deadline_ms = int(min(max(1.0, timeout_s * 1000 + 1), MAX_DEADLINE_MS))
    length = REQUEST.size - LENGTH.size + len(payload)
    return REQUEST.pack(length, call_id, method, deadline_ms) + payload


def cancel(call_id: int) -> bytes:
    return REQUEST.pack(REQUEST.size - LENGTH.size, call_id, CANCEL, 0)


def reply(call_id: int, status: Status, payload: bytes) -> bytes:
    """Returns the frame of a reply. Raises InvalidRequest if the payload is above the limit."""
    check_size(payload)
    return REPLY.pack(REPLY.size - LENGTH.size + len(payload), call_id, status) + payload


def check_size(payload: bytes) -> None:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"a message of {len(payload)} bytes is larger than the limit of {MAX_MESSAGE_BYTES}")


class FrameReader(Generic[Frame]):
    """Splits a byte stream that arrives in arbitrary chunks into frames."""

    def __init__(
        self,
        header: struct.Struct,
        make: Callable[[int, int, int, bytes], Frame] | Callable[[int, int, bytes], Frame],
    ) -> None:
        self._header = header
        self._make: Callable[..., Frame] = make
        self._rest = bytearray()

    @property
    def is_empty(self) -> bool:
        """True if no bytes have arrived after the last complete frame."""
        return not self._rest

    def feed(self, data: bytes) -> list[Frame]:
        """Returns the frames that `data` completes. Raises MalformedFrame, after which the reader is unusable."""
        if not self._rest:
            found, consumed = self._cut(data)
            self._rest += data[consumed:]
        else:
            self._rest += data
            found, consumed = self._cut(self._rest)
            del self._rest[:consumed]
        return found

    def _cut(self, source: bytes | bytearray) -> tuple[list[Frame], int]:
        """Returns the complete frames at the start of `source`, and the offset of their end."""
        found: list[Frame] = []
        begin, header = 0, self._header
        while (end := self._end_of_frame(source, begin)) is not None:
            _, *fields = header.unpack_from(source, begin)
            found.append(self._make(*fields, bytes(source[begin + header.size : end])))
            begin = end
        return found, begin

    def _end_of_frame(self, source: bytes | bytearray, begin: int) -> int | None:
        """Returns the offset of the end of the frame at `begin`, or None if the frame is incomplete."""
        if len(source) - begin < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(source, begin)
        check_length(length, self._header)
        end: int = begin + LENGTH.size + length
        return end if end <= len(source) else None


def check_length(length: int, header: struct.Struct) -> None:
    """Raises MalformedFrame if no frame with this header can have this length."""
    payload_bytes = length + LENGTH.size - header.size
    if not 0 <= payload_bytes <= MAX_MESSAGE_BYTES:
        raise MalformedFrame(f"a frame cannot have a length of {length} bytes")
