"""Server end of a connection of socket RPC: the handshake, then concurrent calls, answered as they finish.

No call is read before the client has proven itself. Every call that was read is answered, or its connection ends. A
waiting handler is cancelled at the call's deadline, by the client, or when the connection ends. Replies that are ready
in one iteration of the event loop are written together. The module does not know other connections.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError

from moonserve.protocol.errors import Cancelled, DeadlineExceeded, InvalidRequest, MoonserveError, Overloaded, PeerLost
from moonserve.protocol.rpc import frames, handshake, socket_addresses
from moonserve.protocol.rpc.eager_tasks import EagerStarter
from moonserve.protocol.rpc.frames import FrameReader, MalformedFrame, Request, Status
from moonserve.protocol.rpc.handshake import Responder
from moonserve.protocol.rpc.wire import handler_failure

PROTO_PACKAGE = "moonserve"


@dataclass(frozen=True, slots=True)
class Method:
    path: str
    """Path in the form of generated stubs: /package.Service/Method."""
    deserialize: Callable[[bytes], Any]
    handler: Callable[[Any, Any], Coroutine[Any, Any, Any]] | Callable[[Any, Any], AsyncGenerator[Any, None]]
    """Coroutine function that returns the reply or, for a stream, function that returns a generator of messages."""


@dataclass(frozen=True, slots=True)
class ConnectionTakeover:
    """Path whose call transfers the connection to code that speaks another protocol on it."""

    path: str
    admit: Callable[[], None]
    """Raises a MoonserveError if the connection cannot be taken."""
    take: Callable[[socket.socket], None]
    """Receives ownership of the socket, which is non-blocking and continues after the reply."""


def methods_of(name: str, servicer: object) -> Iterator[Method]:
    """Yields the methods of a service that the servicer implements; those of the generated base class are not
    coroutines. The service's generated module must have been imported."""
    service: ServiceDescriptor = descriptor_pool.Default().FindServiceByName(f"{PROTO_PACKAGE}.{name}")
    for method in service.methods:
        handler = getattr(servicer, method.name)
        if inspect.iscoroutinefunction(handler) or inspect.isasyncgenfunction(handler):
            message_class = message_factory.GetMessageClass(method.input_type)
            path = f"/{service.full_name}/{method.name}"
            yield Method(path, message_class.FromString, handler)


log = logging.getLogger(__name__)

# The handshake takes two round trips, but a peer may stall for seconds. Clients without a handshake beyond
# `socket_server.MAX_PENDING_HANDSHAKES` are disconnected earlier.
HANDSHAKE_S = 30.0
# Limit of waiting calls per client, each of which costs a task. Further calls are still read and started, since the
# waiting ones may depend on them, and are refused only if they would wait as well.
MAX_WAITING_CALLS = 8192


@dataclass(slots=True, eq=False)
class CallContext:
    """Context of a call for its handler: the part of gRPC's context that the cluster's handlers use."""

    _deadline_at: float

    def time_remaining(self) -> float:
        """Returns the seconds until the call's deadline."""
        return self._deadline_at - time.monotonic()


@dataclass(slots=True)
class _Waiting:
    message: Any
    task: asyncio.Task[Any]
    timer: asyncio.TimerHandle
    is_late: bool = False
    """True if the deadline has passed. The timer sets it, because a loop's clock may be 1 ms behind its timers."""


class ConnectionOwner(Protocol):
    """What a connection needs of the server that accepted it."""

    def add_connection(self, connection: "ServerConnection") -> None: ...

    def on_authenticated(self, connection: "ServerConnection") -> None: ...

    def remove_connection(self, connection: "ServerConnection") -> None: ...


class ServerConnection(asyncio.Protocol):
    def __init__(
        self,
        methods: Sequence[Method | ConnectionTakeover],
        cluster_token: str,
        eager: EagerStarter,
        owner: ConnectionOwner,
    ) -> None:
        self._methods = methods
        self._eager = eager
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        nonce = secrets.token_bytes(handshake.NONCE_BYTES)
        paths = [method.path for method in methods]
        self._handshake: Responder | None = Responder(cluster_token, paths, nonce)
        self._arrived = bytearray()
        """Unprocessed bytes of the handshake."""
        self._reader = FrameReader(frames.REQUEST, Request)
        self._replies: list[bytes] = []
        self._flush_is_due = False
        self._waiting: dict[int, _Waiting] = {}
        self._client_reads = asyncio.Event()
        """Cleared while the client does not read; streams then pause."""
        self._client_reads.set()
        self._finishing = False

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Tasks of the waiting handlers."""
        return [call.task for call in self._waiting.values()]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        socket_addresses.tune_socket(transport.get_extra_info("socket"))
        self._handshake_timer = self._loop.call_later(HANDSHAKE_S, self.abort)
        self._owner.add_connection(self)

    def data_received(self, data: bytes) -> None:
        try:
            if self._handshake is not None:
                data = self._shake_hands(self._handshake, data)
            for request in self._reader.feed(data):
                self._start_call(request)
        except MoonserveError as error:
            log.warning("a connection of socket RPC ended: %s", error)
            self._transport.close()
            return
        self._flush()

    def pause_writing(self) -> None:
        """Stops reading requests, since a client that does not read its replies may not send more calls."""
        self._client_reads.clear()
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._client_reads.set()
        self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._handshake_timer.cancel()
        for task in self.tasks:
            task.cancel()
        self._owner.remove_connection(self)

    def finish(self) -> None:
        """Refuses new calls and closes the connection once the current ones are answered."""
        self._finishing = True
        if not self._waiting:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _shake_hands(self, responder: Responder, data: bytes) -> bytes:
        """Advances the handshake and returns the bytes that follow it. Raises the error if the client is refused."""
        self._arrived += data
        self._transport.write(handshake.advance(responder, self._arrived))
        if responder.refusal is not None:
            raise responder.refusal
        if responder.needed:
            return b""
        self._handshake = None
        self._handshake_timer.cancel()
        self._owner.on_authenticated(self)
        return bytes(self._arrived)

    def _start_call(self, request: Request) -> None:
        if request.method == frames.CANCEL:
            self._cancel(request.call_id)
            return
        message = None
        try:
            self._admit(request)
            method = self._methods[request.method]
            if isinstance(method, ConnectionTakeover):
                self._take_over(request, method)
                return
            message = method.deserialize(request.payload)
            context = CallContext(time.monotonic() + request.deadline_ms / 1000)
            body = method.handler(message, context)
            if isinstance(body, AsyncGenerator):
                body = self._stream(request.call_id, body)
            outcome = self._eager.start(body)
            if isinstance(outcome, asyncio.Task):
                self._wait_for(request, message, outcome)
            else:
                self._succeed(request.call_id, message, outcome)
        except MalformedFrame:
            raise
        except DecodeError as error:
            self._fail(request.call_id, message, InvalidRequest(f"malformed request: {error}"))
        except (Exception, asyncio.CancelledError) as error:
            self._fail(request.call_id, message, error)

    async def _stream(self, call_id: int, messages: AsyncGenerator[Any, None]) -> Empty:
        async with contextlib.aclosing(messages):
            async for message in messages:
                await self._client_reads.wait()
                self._replies.append(frames.reply(call_id, Status.MORE, message.SerializeToString()))
                self._flush()  # at once, because only written bytes reveal that the client does not read
        return Empty()

    def _admit(self, request: Request) -> None:
        """Raises an error if the call must not start. MalformedFrame ends the connection."""
        if request.method >= len(self._methods) or request.call_id in self._waiting:
            raise MalformedFrame("the call names an unknown method or re-uses the id of a running call")
        if self._finishing:
            raise PeerLost("the server is stopping")

    def _take_over(self, request: Request, by: ConnectionTakeover) -> None:
        """Transfers a duplicate of the socket. The transport drops its own without closing the connection."""
        if self._waiting or self._replies or not self._reader.is_empty:
            raise MalformedFrame("a connection can only be taken over before its first other call")
        by.admit()
        fileno: int = self._transport.get_extra_info("socket").fileno()
        sock = socket.socket(fileno=os.dup(fileno))
        self._transport.abort()
        sock.setblocking(False)
        try:
            sock.send(frames.reply(request.call_id, Status.OK, b""))  # fits: first bytes since the handshake
        except OSError:  # the client has disconnected
            sock.close()
            return
        by.take(sock)

    def _wait_for(self, request: Request, message: Any, task: asyncio.Task[Any]) -> None:
        if len(self._waiting) >= MAX_WAITING_CALLS:
            task.cancel()
            raise Overloaded("too many calls of this client are waiting", retry_after_s=0.1)
        deadline_at = self._loop.time() + request.deadline_ms / 1000
        timer = self._loop.call_at(deadline_at, self._expire, request.call_id)
        self._waiting[request.call_id] = _Waiting(message, task, timer)
        task.add_done_callback(partial(self._waited, request.call_id))

    def _expire(self, call_id: int) -> None:
        call = self._waiting[call_id]  # present: a call's timer is cancelled when the call is removed
        call.is_late = True
        call.task.cancel()

    def _waited(self, call_id: int, task: asyncio.Task[Any]) -> None:
        call = self._waiting.pop(call_id)
        call.timer.cancel()
        if task.cancelled():
            late = DeadlineExceeded("the call's deadline passed in its handler")
            self._fail(call_id, call.message, late if call.is_late else Cancelled("the call was cancelled"))
        elif (error := task.exception()) is not None:
            self._fail(call_id, call.message, error)
        else:
            self._succeed(call_id, call.message, task.result())
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush_late)

    def _cancel(self, call_id: int) -> None:
        call = self._waiting.get(call_id)
        if call is not None:  # None: it was answered while the cancellation was in flight
            call.task.cancel()

    def _succeed(self, call_id: int, message: Any, reply: Any) -> None:
        try:
            self._replies.append(frames.reply(call_id, Status.OK, reply.SerializeToString()))
        except Exception as error:  # the handler returned no message, an incomplete or a too large one
            self._fail(call_id, message, error)

    def _fail(self, call_id: int, message: Any, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            error = Cancelled("the handler was cancelled")
        payload = handler_failure(error, message).SerializeToString()
        self._replies.append(frames.reply(call_id, Status.FAILURE, payload))

    def _flush_late(self) -> None:
        self._flush_is_due = False
        self._flush()
        if self._finishing and not self._waiting:
            self._transport.close()

    def _flush(self) -> None:
        if self._replies and not self._transport.is_closing():
            self._transport.write(b"".join(self._replies))
        self._replies.clear()
