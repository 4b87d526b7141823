"""Client of socket RPC in asyncio: a channel that dials, and its connection with any number of concurrent calls."""

import asyncio
import math
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, NoReturn, cast

from moonserve.protocol.errors import DeadlineExceeded, Incompatible, MoonserveError, Overloaded, PeerLost
from moonserve.protocol.process.event_loop import Timer
from moonserve.protocol.process.tls import CLOSE_TIMEOUT_S, IN_HANDSHAKE, Certificates, require_address, tls_error
from moonserve.protocol.rpc import frames, handshake, socket_addresses
from moonserve.protocol.rpc.frames import MAX_CALL_ID, MAX_MESSAGE_BYTES, FrameReader, Reply, Status
from moonserve.protocol.rpc.handshake import Initiator
from moonserve.protocol.rpc.wire import failure_from_bytes

# Deadlines this close together share one timer.
_TICK_S = 0.002
# Limit of unsent bytes for a peer that does not read: two messages of maximal size.
_MAX_UNSENT_BYTES = 2 * MAX_MESSAGE_BYTES
Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]


class _Call(NamedTuple):
    reply: asyncio.Future[bytes]
    deadline_at: float


Messages = asyncio.Queue[bytes | MoonserveError | None]
"""Received messages of a stream. The last entry is None, or the error that ended the stream."""


class AsyncConnection(asyncio.Protocol):
    """Connection with any number of concurrent calls after the handshake. A broken connection stays broken.

    Every call ends with its reply, at its deadline or with the connection. A call is written at once if no other is in
    flight; otherwise the calls of one iteration of the event loop are written together."""

    def __init__(self, cluster_token: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        """Done when the handshake has ended; it carries the error of a failed one."""
        self.closed = asyncio.Event()
        self.opened = False
        self.usable = False
        """True from the end of a successful handshake until the connection breaks."""
        self._handshake = Initiator(cluster_token, secrets.token_bytes(handshake.NONCE_BYTES))
        self._arrived = bytearray()
        self._numbers: dict[str, int] = {}
        self._reader = FrameReader(frames.REPLY, Reply)
        self._calls: dict[int, _Call] = {}
        self._streams: dict[int, Messages] = {}
        self._last_id = 0
        self._unwritten: list[bytes] = []
        self._is_full = False
        self._timer = Timer(self._expire, self._loop.time)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.opened = True
        socket_addresses.tune_socket(transport.get_extra_info("socket"))
        try:
            certificate = transport.get_extra_info("peercert")
            if certificate is not None:
                require_address(certificate, transport.get_extra_info("peername")[0])
        except MoonserveError as error:
            self._break(error)
            return
        self._transport.write(self._handshake.hello)

    def data_received(self, data: bytes) -> None:
        try:
            if self._handshake.needed:
                data = self._shake_hands(data)
            for reply in self._reader.feed(data):
                self._settle(reply)
        except MoonserveError as error:
            self._break(error)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False

    def connection_lost(self, error: Exception | None) -> None:
        if isinstance(error, ssl.SSLError):  # in TLS 1.3 a peer refuses our certificate only after our first bytes
            self._break(tls_error(error))
        in_tls = not self.usable and self._transport.get_extra_info("peercert") is not None
        how = IN_HANDSHAKE if in_tls else "broke"
        self._break(PeerLost(f"the connection {how}: {error or 'closed by the peer'}"))
        self._timer.set(None)
        self.closed.set()

    def close(self) -> None:
        self._break(PeerLost("the channel was closed"))

    def offers(self, path: str) -> bool:
        """Returns true if the peer serves this method."""
        return path in self._numbers

    def begin(self, path: str, payload: bytes, deadline_at: float) -> tuple[int, asyncio.Future[bytes]]:
        """Sends a call and returns its id and the future of its reply.

        Raises Incompatible if the peer has no such method, InvalidRequest if the message is too large, and Overloaded
        if the peer does not read.
        """
        call_id = self._send_request(path, payload, deadline_at - self._loop.time())
        reply: asyncio.Future[bytes] = self._loop.create_future()
        self._calls[call_id] = _Call(reply, deadline_at)
        if self._timer.due_at is None or deadline_at < self._timer.due_at - _TICK_S:
            self._timer.set(deadline_at)
        return call_id, reply

    def begin_stream(self, path: str, payload: bytes) -> tuple[int, Messages]:
        """Sends a call of a stream, without a deadline, and returns its id and its messages. Raises like `begin`."""
        call_id = self._send_request(path, payload, math.inf)
        messages = self._streams[call_id] = Messages()
        return call_id, messages

    def _send_request(self, path: str, payload: bytes, timeout_s: float) -> int:
        number = self._numbers.get(path)
        if number is None:
            raise Incompatible(f"the peer has no method {path}")
        if self._is_full and self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            raise Overloaded("the peer reads calls more slowly than they are sent", retry_after_s=0.1)
        call_id = self._new_id()
        self._write(frames.request(call_id, number, timeout_s, payload))
        return call_id

    def abandon_call(self, call_id: int) -> None:
        """Abandons a call and sends a cancellation to the peer. No-op if the call has ended."""
        call = self._calls.pop(call_id, None) or self._streams.pop(call_id, None)
        if call is not None and self.usable:
            self._write(frames.cancel(call_id))

    def _shake_hands(self, data: bytes) -> bytes:
        """Advances the handshake and returns the bytes that follow it."""
        self._arrived += data
        self._transport.write(handshake.advance(self._handshake, self._arrived))
        if self._handshake.needed:
            return b""
        self._numbers = {path: number for number, path in enumerate(self._handshake.methods)}
        self.usable = True
        if not self.ready.done():
            self.ready.set_result(None)
        return bytes(self._arrived)

    def _new_id(self) -> int:
        while True:
            self._last_id = (self._last_id + 1) & MAX_CALL_ID
            if self._last_id not in self._calls and self._last_id not in self._streams:
                return self._last_id

    def _write(self, frame: bytes) -> None:
        if not self._calls and not self._unwritten:
            self._transport.write(frame)
            return
        if not self._unwritten:
            self._loop.call_soon(self._flush)
        self._unwritten.append(frame)

    def _flush(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"".join(self._unwritten))
        self._unwritten.clear()

    def _settle(self, reply: Reply) -> None:
        if self._streams and (messages := self._streams.get(reply.call_id)) is not None:
            self._settle_stream(messages, reply)
            return
        call = self._calls.pop(reply.call_id, None)
        if call is None or call.reply.done():  # abandoned
            return
        if reply.status == Status.OK:
            call.reply.set_result(reply.payload)
        else:
            call.reply.set_exception(failure_from_bytes(reply.payload))

    def _settle_stream(self, messages: Messages, reply: Reply) -> None:
        if reply.status == Status.MORE:
            messages.put_nowait(reply.payload)
            return
        del self._streams[reply.call_id]
        messages.put_nowait(failure_from_bytes(reply.payload) if reply.status == Status.FAILURE else None)

    def _expire(self) -> None:
        due_at = self._loop.time() + _TICK_S
        for call_id, call in list(self._calls.items()):
            if call.deadline_at <= due_at:
                del self._calls[call_id]
                _fail(call.reply, DeadlineExceeded("no reply within the call's deadline"))
        if self._calls:
            self._timer.set(min(call.deadline_at for call in self._calls.values()))

    def _break(self, why: MoonserveError) -> None:
        """Marks the connection as broken and fails everything that waits for it. Idempotent."""
        self.usable = False
        _fail(self.ready, why)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            _fail(call.reply, why)
        streams, self._streams = self._streams, {}
        for messages in streams.values():
            messages.put_nowait(why)
        self._transport.abort()


def _fail(waiter: asyncio.Future[bytes] | asyncio.Future[None], why: MoonserveError) -> None:
    if not waiter.done():
        waiter.set_exception(why)


class SocketChannel:
    """What the channels for event loops and for threads share. They have no streams: stubs can be built, but calling a
    stream raises."""

    def __init__(self, address: str, cluster_token: str, tls: Certificates | None) -> None:
        """Raises InvalidRequest if `address` is malformed, Incompatible if only one end uses TLS."""
        socket_addresses.require_same_tls(address, tls)
        self._address, self._token, self._tls = address, cluster_token, tls
        self._target = socket_addresses.parse_address(address)

    def unary_stream(self, path: str, *_of_grpc: object, **_more_of_grpc: object) -> Callable[..., NoReturn]:
        def refuse(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{path} is a stream; call it over gRPC")

        return refuse

    stream_unary = stream_stream = unary_stream


class AsyncChannel(SocketChannel):
    """Channel to one `lean://` address (see `socket_addresses`): the part of `grpc.aio.Channel` that stubs need.

    It belongs to the event loop of its first call. Every call has a deadline and raises MoonserveErrors, so
    `Channels.call` has nothing to translate. A broken connection fails its calls with PeerLost, and the next call dials
    again. The cluster token is proven once, in the handshake; the metadata that gRPC sends with each call is ignored.
    """

    def __init__(self, address: str, cluster_token: str, tls: Certificates | None = None) -> None:
        super().__init__(address, cluster_token, tls)
        self._connection: AsyncConnection | None = None
        self._dialling: asyncio.Task[AsyncConnection] | None = None
        self._closed = False

    def unary_unary(
        self, path: str, request_serializer: Serializer, response_deserializer: Deserializer, **_of_grpc: object
    ) -> Callable[..., Awaitable[Any]]:
        """Makes a method for the constructor of a generated stub."""

        async def call(request: Any, *, timeout: float, metadata: object = None, wait_for_ready: bool = False) -> Any:
            """Calls the method. gRPC's `wait_for_ready` is ignored: a process publishes its address when it serves."""
            deadline_at = asyncio.get_running_loop().time() + timeout
            payload = request_serializer(request)
            connection = self.live() or await self.connect(deadline_at)
            return response_deserializer(await exchange(connection, path, payload, deadline_at))

        return call

    def live(self) -> AsyncConnection | None:
        connection = self._connection
        return connection if connection is not None and connection.usable else None

    async def connect(self, deadline_at: float) -> AsyncConnection:
        """Returns the live connection and dials if there is none. Concurrent callers share one attempt.

        Raises PeerLost, Unauthenticated, Incompatible or DeadlineExceeded.
        """
        try:
            async with asyncio.timeout_at(deadline_at):
                return await self._shared_dial()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._address} did not answer within the deadline") from error

    async def close(self, grace: float | None = None) -> None:
        """Closes the channel. Calls in flight and all later calls fail with PeerLost."""
        self._closed = True
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait([self._dialling])
        if self._connection is not None:
            self._connection.close()
            await self._connection.closed.wait()

    async def _shared_dial(self) -> AsyncConnection:
        connection = self.live()
        if connection is not None:
            return connection
        if self._closed:
            raise PeerLost("the channel was closed")
        if self._dialling is None:
            self._dialling = asyncio.create_task(self._dial())
            self._dialling.add_done_callback(self._dialled)
        dialling = self._dialling
        # `wait` keeps cancellations of call and attempt apart. An attempt that outlasts this call serves the next one.
        await asyncio.wait({dialling})
        if dialling.cancelled():
            raise PeerLost("the channel was closed")
        connection = dialling.result()
        if not connection.usable:  # a call on it would only end at its deadline
            raise PeerLost(f"{self._address} closed the connection at once")
        return connection

    def _dialled(self, dialling: asyncio.Task[AsyncConnection]) -> None:
        self._dialling = None
        if not dialling.cancelled() and dialling.exception() is None:
            self._connection = dialling.result()

    async def _dial(self) -> AsyncConnection:
        connection = AsyncConnection(self._token)
        try:
            await self._open(connection)
            await connection.ready
        except ssl.SSLError as error:
            await _discard(connection)
            raise tls_error(error) from error
        except OSError as error:
            await _discard(connection)
            raise PeerLost(f"{self._address} cannot be reached: {error}") from error
        except (MoonserveError, asyncio.CancelledError):
            await _discard(connection)
            raise
        return connection

    async def _open(self, connection: AsyncConnection) -> None:
        loop = asyncio.get_running_loop()
        family, target = self._target
        if isinstance(target, str):
            # uvloop cannot dial abstract names. Within a host, connecting does not block unless the backlog is full.
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                sock.connect(target)
                await loop.create_unix_connection(lambda: connection, sock=sock)
            except BaseException:
                sock.close()
                raise
        else:
            host, port = target
            await loop.create_connection(
                lambda: connection,
                host,
                port,
                family=family,
                ssl=None if self._tls is None else self._tls.initiator,
                ssl_shutdown_timeout=None if self._tls is None else CLOSE_TIMEOUT_S,
            )


async def _discard(connection: AsyncConnection) -> None:
    """Closes a connection whose setup failed and waits until its socket is released."""
    if connection.opened:
        connection.close()
        await connection.closed.wait()


async def exchange(connection: AsyncConnection, path: str, payload: bytes, deadline_at: float) -> bytes:
    """Makes one call over a connection and returns the serialized reply. Cancellation also cancels the handler."""
    call_id, reply = connection.begin(path, payload, deadline_at)
    try:
        return await reply
    except asyncio.CancelledError:
        connection.abandon_call(call_id)
        raise
