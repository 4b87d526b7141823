"""Operations on a client's connection that ASGI lacks: abort, wait until the client has read, write without waiting.

uvicorn's `send` is a method of its request cycle, which knows the transport. The middleware stores a Connection in the
scope.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope, Send

from gateway.http.errors import ApiError
from protocol.errors import Cancelled

KEY = "moonserve.connection"
_RESET = struct.pack("@ii", 1, 0)  # linger for 0 s: closing discards unsent data (socket(7))


class Connection:
    """The client's connection of one request."""

    def __init__(self, send: Send) -> None:
        self._cycle: Any = send.__self__  # type: ignore[attr-defined]

    @staticmethod
    def of(scope: Scope) -> Connection:
        """Returns the connection that the middleware stored in the scope."""
        found: Connection = scope[KEY]
        return found

    def may_wait(self) -> bool:
        """Returns True if sending now could wait for the client."""
        return bool(self._cycle.flow.write_paused)

    def takes_chunks(self) -> bool:
        """Returns True if `write_chunk` may be called: the reply has begun, is chunked, and sending need not wait."""
        cycle = self._cycle
        return cycle.chunked_encoding is True and not (cycle.disconnected or self.may_wait())

    def write_chunk(self, body: bytes) -> None:
        """Writes a part of the reply's body immediately. Equals `send` of a body, without its coroutines."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    async def drained(self) -> None:
        """Waits until the client has taken what was sent, except for at most one buffer."""
        if self.may_wait():
            await self._cycle.flow.drain()

    def close_after_reply(self) -> None:
        """Accepts no further request on this connection."""
        self._cycle.keep_alive = False

    def abort(self) -> None:
        """Drops the connection and all data still buffered for it, here and in the kernel."""
        drop(self._cycle.transport)


def drop(transport: asyncio.Transport) -> None:
    """Ends a connection without sending buffered data. Does nothing if it has ended."""
    client = transport.get_extra_info("socket")
    # else the kernel would keep megabytes for a client that hardly reads
    if client is not None and client.fileno() >= 0:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Reads the whole body. Raises ApiError: 413 as soon as the body is known to be too long, 408 if it does not arrive
    in time. Raises Cancelled if the client disconnects."""
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, max_bytes)
    except TimeoutError as error:
        raise ApiError(408, "the body did not arrive in time", kind="timeout_error", code="request_timeout") from error
    except ClientDisconnect as error:
        raise Cancelled("the client went away") from error


async def _read(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
