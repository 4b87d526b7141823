"""A client's connection: bounds on its head, body, time and reading (uvicorn's protocol), and operations that ASGI
lacks: abort, drain, direct writes.

uvicorn's `send` is a method of its request cycle, which knows the transport. The middleware stores a `Connection` in
the scope, through which replies reach it.

Rule of `BoundedProtocol`: a connection with a reply in flight is ended for one reason only, that its client does not
read. uvicorn itself allows endless heads, connections that stay silent forever, and a refused request's body that
trickles in forever. Timers run only while the gateway waits for a client, so a request that arrives in one piece costs
none. When the gateway stops, no request is lost on its way.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from moonserve.gateway.config import ClientConfig
from moonserve.gateway.errors import ApiError, reply_for
from moonserve.protocol.errors import Cancelled

log = logging.getLogger(__name__)

KEY = "moonserve.connection"
_RESET = struct.pack("@ii", 1, 0)  # linger for 0 s: closing discards unsent data (socket(7))

MAX_REFUSED = 64
"""Connections above the maximum that receive the reason of their refusal; further ones are closed at once."""

LINGER_S = 0.5
"""Seconds for which a silent connection stays open when the gateway stops. A request that has left its client, or waits
in the kernel, arrives within this time and is answered."""

_RECHECK_S = 1.0
# Bytes of its buffer that a client must take within `slow_client_s` to count as reading. The kernel's own buffers,
# which it empties first, are hundreds of KiB.
_MIN_READ_BYTES = 16 * 2**10


class Connection:
    """The client's connection of one request."""

    def __init__(self, send: Send) -> None:
        self._cycle: Any = send.__self__  # type: ignore[attr-defined]

    @staticmethod
    def of(scope: Scope) -> "Connection":
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
        raise Cancelled("the client disconnected") from error


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


class _Phase(Enum):
    """Part of a request that the client sends next."""

    HEAD = auto()
    BODY = auto()
    NOTHING = auto()


class ConnectionSet:
    """All connections of a gateway, and whether they are closing."""

    def __init__(self) -> None:
        self.is_closing = False
        self._connections: set[BoundedProtocol] = set()
        self.is_empty = asyncio.Event()
        self.is_empty.set()

    def close(self) -> None:
        """Ends each connection after its next reply, or once it is silent."""
        self.is_closing = True
        for connection in self._connections:
            connection.close_when_idle()

    def add(self, connection: "BoundedProtocol") -> None:
        self._connections.add(connection)
        self.is_empty.clear()
        if self.is_closing:
            connection.close_when_idle()

    def remove(self, connection: "BoundedProtocol") -> None:
        self._connections.discard(connection)
        if not self._connections:
            self.is_empty.set()


class BoundedProtocol(HttpToolsProtocol):
    """One connection with bounds on its head, its body and its reader."""

    def __init__(
        self,
        *args: Any,
        client_config: ClientConfig,
        max_connections: float,
        connection_set: ConnectionSet,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._connection_set = connection_set
        self._config = client_config
        self._max_connections = max_connections
        self._phase = _Phase.HEAD
        self._message = 0  # number of the message of `_phase`
        self._waits_for: tuple[int, _Phase] | None = None  # message and phase that the timer belongs to
        self._timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # of this message, as far as parsed
        self._fed_bytes = 0  # since its head began, parsed or not
        self._refusal: ApiError | None = None
        self._refusal_of_any: ApiError | None = None  # applies to any request on this connection

    # From the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection_set.add(self)
        num_surplus = len(self.connections) - self._max_connections
        if num_surplus > MAX_REFUSED:
            transport.abort()
            return
        if num_surplus > 0:
            self._refusal_of_any = _too_many(self._max_connections)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._read_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._connection_set.remove(self)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._refusal_of_any is not None:
            self._refusal = self._refusal_of_any
            self.send_400_response("")
            return
        message = self._message
        super().data_received(data)
        if self.transport.is_closing():
            return
        # If a head began within these data, the parser has counted its complete parts, which is enough.
        self._fed_bytes += len(data) if self._message == message else 0
        if self._phase is _Phase.HEAD and self._fed_bytes > self._config.max_header_bytes:
            self._refusal = self._too_large()
            self.send_400_response("")
            return
        self._wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    # From the parser. An exception raised here comes back as a parser error and ends in `send_400_response`.

    def on_message_begin(self) -> None:
        self._phase, self._message = _Phase.HEAD, self._message + 1
        self._head_bytes = self._fed_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._phase = _Phase.BODY
        super().on_headers_complete()
        if self._connection_set.is_closing:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._phase = _Phase.NOTHING
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Replies with the refusal if there is one, else with 400 for invalid HTTP; then ends the connection."""
        error = self._refusal or ApiError(400, "this is not a valid HTTP/1.1 request", code="invalid_http")
        self._refusal = error
        if self._is_replying():
            self.transport.abort()  # bytes written now would be taken for a part of the reply
            return
        reply = reply_for(error)
        body = reply.body()
        headers = {
            "content-type": "application/json",
            "connection": "close",
            "content-length": f"{len(body)}",
            **reply.headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[reply.status] + f"{lines}\r\n".encode() + body)
        self.transport.close()

    # Leaving

    def close_when_idle(self) -> None:
        """Ends the connection after the reply in flight or the next one, or after `LINGER_S` of silence."""
        if self._is_replying():
            self.cycle.keep_alive = False
        self._linger_timer = self.loop.call_later(LINGER_S, self._end_if_silent)

    def _end_if_silent(self) -> None:
        if self._is_replying() or (self._phase is _Phase.HEAD and self._message):
            self._linger_timer = self.loop.call_later(LINGER_S, self._end_if_silent)
        else:
            self.transport.close()

    # Waiting

    def _count(self, num_bytes: int) -> None:
        """Counts bytes of the head and of trailers, which come after the body. Raises ApiError above the limit."""
        self._head_bytes += num_bytes
        if self._head_bytes > self._config.max_header_bytes:
            self._refusal = self._too_large()
            raise self._refusal

    def _too_large(self) -> ApiError:
        max_bytes = self._config.max_header_bytes
        return ApiError(431, f"the head of the request is larger than {max_bytes} bytes", code="headers_too_large")

    def _wait(self) -> None:
        """Starts the timer for the part that the client sends next."""
        awaited = None if self._phase is _Phase.NOTHING else (self._message, self._phase)
        if awaited == self._waits_for:
            return
        self._waits_for = awaited
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if awaited is not None:
            is_head = self._phase is _Phase.HEAD
            config = self._config
            self._start_timer(config.header_timeout_s if is_head else config.body_timeout_s, self._give_up)

    def _start_timer(self, seconds: float, callback: Callable[[], None]) -> None:
        self._timer = self.loop.call_later(seconds, callback)

    def _give_up(self) -> None:
        if self._is_replying():  # the reader of a body has its own deadline, and replies
            self._start_timer(_RECHECK_S, self._give_up)
        elif self._phase is _Phase.HEAD and self._message:
            self._refusal = ApiError(
                408,
                "the head of the request did not arrive in time",
                kind="timeout_error",
                code="request_timeout",
            )
            self.send_400_response("")
        else:  # the client is silent, or has its reply and continues to send
            self.transport.close()

    def _is_replying(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(self._config.slow_client_s, self._check_reader, unread)

    def _check_reader(self, unread_before: int) -> None:
        """Drops a client that has hardly read since the last check."""
        if self.transport.get_write_buffer_size() <= unread_before - _MIN_READ_BYTES:
            self._watch_reader()
            return
        log.info("a client did not read for %.0f s", self._config.slow_client_s)
        drop(self.transport)


def _too_many(max_connections: float) -> ApiError:
    return ApiError(
        503,
        f"this gateway already has {max_connections:,.0f} connections; try again, or use another gateway",
        kind="service_unavailable_error",
        code="too_many_connections",
        headers={"retry-after": "1"},
    )
