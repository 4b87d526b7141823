"""What travels on a lean connection after the handshake: frames, each with its length in front (little-endian).

request  length u32 · call id u32 · method u32 · deadline in ms u32 · payload
reply    length u32 · call id u32 · status u8 · payload

The length counts what follows it. A method is its place in the list that the server named in the handshake; `CANCEL`
in its stead ends the call of that id. A reply's payload is the reply message, or a `common.Failure`. A stream is any
number of replies of status MORE, then one that ends the call. Its rule: a length that no frame has is refused before
anything is kept for it. Knows no sockets and no messages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

from protocol.errors import InvalidRequest, PeerLost

# One message must hold a prompt of a million tokens.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CANCEL = 0xFFFF_FFFF
MAX_DEADLINE_MS = 0xFFFF_FFFF
MAX_CALL_ID = 0xFFFF_FFFF

LENGTH = struct.Struct("<I")
REQUEST = struct.Struct("<IIII")
REPLY = struct.Struct("<IIB")


class MalformedFrame(PeerLost):
    """What arrived is not a frame of this protocol; whoever sent it is no peer any more."""


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
    """Raises InvalidRequest for a payload above the limit."""
    check_size(payload)
    # Rounded up: the server must not give up before its caller.
    deadline_ms = int(min(max(1.0, timeout_s * 1000 + 1), MAX_DEADLINE_MS))
    length = REQUEST.size - LENGTH.size + len(payload)
    return REQUEST.pack(length, call_id, method, deadline_ms) + payload


def cancel(call_id: int) -> bytes:
    return REQUEST.pack(REQUEST.size - LENGTH.size, call_id, CANCEL, 0)


def reply(call_id: int, status: Status, payload: bytes) -> bytes:
    """Raises InvalidRequest for a payload above the limit."""
    check_size(payload)
    return REPLY.pack(REPLY.size - LENGTH.size + len(payload), call_id, status) + payload


def check_size(payload: bytes) -> None:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"a message of {len(payload)} bytes is larger than the limit of {MAX_MESSAGE_BYTES}")


def request_reader() -> FrameReader[Request]:
    return FrameReader(REQUEST, Request)


def reply_reader() -> FrameReader[Reply]:
    return FrameReader(REPLY, Reply)


class FrameReader(Generic[Frame]):
    """Cuts a stream of bytes into frames, wherever the stream was cut before."""

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
        """Nothing has come behind the last frame."""
        return not self._rest

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises MalformedFrame; the stream is of no use after that."""
        if not self._rest:
            found, consumed = self._cut(data)
            self._rest += data[consumed:]
        else:
            self._rest += data
            found, consumed = self._cut(self._rest)
            del self._rest[:consumed]
        return found

    def _cut(self, source: bytes | bytearray) -> tuple[list[Frame], int]:
        """The whole frames at the beginning of `source`, and where they end."""
        found: list[Frame] = []
        begin, header = 0, self._header
        while (end := self._end_of_frame(source, begin)) is not None:
            _, *fields = header.unpack_from(source, begin)
            found.append(self._make(*fields, bytes(source[begin + header.size : end])))
            begin = end
        return found, begin

    def _end_of_frame(self, source: bytes | bytearray, begin: int) -> int | None:
        """None while it has not arrived completely."""
        if len(source) - begin < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(source, begin)
        check_length(length, self._header)
        end: int = begin + LENGTH.size + length
        return end if end <= len(source) else None


def check_length(length: int, header: struct.Struct) -> None:
    """Raises MalformedFrame for a length that no frame with this header has."""
    payload_bytes = length + LENGTH.size - header.size
    if not 0 <= payload_bytes <= MAX_MESSAGE_BYTES:
        raise MalformedFrame(f"a frame of {length} bytes cannot be")
