"""Asyncio channel for lean calls: the part of `grpc.aio.Channel` that generated stubs need, over one connection.

Every call has a deadline and raises MoonserveErrors, so `Channels.call` has nothing to translate. A broken connection
fails its calls with PeerLost, and the next call dials again. The cluster token is proven once, in the handshake; the
metadata that gRPC sends with each call is ignored.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, NoReturn

from protocol.errors import DeadlineExceeded, MoonserveError, PeerLost
from protocol.lean import sockets
from protocol.lean.connection import Connection
from protocol.tls import GOODBYE_S, Certificates, translated


class UnaryOnly:
    """Stream methods for channels without streams, so that stubs can be built; calling a stream raises."""

    def unary_stream(self, path: str, *_of_grpc: object, **_more_of_grpc: object) -> Callable[..., NoReturn]:
        def refuse(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{path} is a stream; call it over gRPC")

        return refuse

    stream_unary = stream_stream = unary_stream


class LeanChannel(UnaryOnly):
    """Channel to one lean address (see `protocol.lean.sockets`). It belongs to the event loop of its first call."""

    def __init__(self, address: str, cluster_token: str, tls: Certificates | None = None) -> None:
        """Raises InvalidRequest if `address` is malformed, Incompatible if only one end uses TLS."""
        sockets.require_same_tls(address, tls)
        self._address = address
        self._tls = tls
        self._target = sockets.parse(address)
        self._token = cluster_token
        self._connection: Connection | None = None
        self._dialling: asyncio.Task[Connection] | None = None
        self._closed = False

    def unary_unary(
        self,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_of_grpc: object,
    ) -> UnaryCall:
        return UnaryCall(self, path, request_serializer, response_deserializer)

    def live(self) -> Connection | None:
        connection = self._connection
        return connection if connection is not None and connection.usable else None

    async def connect(self, give_up_at: float) -> Connection:
        """Returns the live connection and dials if there is none. Concurrent callers share one attempt.

        Raises PeerLost, Unauthenticated, Incompatible or DeadlineExceeded.
        """
        try:
            async with asyncio.timeout_at(give_up_at):
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
            await self._connection.gone.wait()

    async def _shared_dial(self) -> Connection:
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

    def _dialled(self, dialling: asyncio.Task[Connection]) -> None:
        self._dialling = None
        if not dialling.cancelled() and dialling.exception() is None:
            self._connection = dialling.result()

    async def _dial(self) -> Connection:
        connection = Connection(self._token)
        try:
            await self._open(connection)
            await connection.ready
        except ssl.SSLError as error:
            await _discard(connection)
            raise translated(error) from error
        except OSError as error:
            await _discard(connection)
            raise PeerLost(f"{self._address} cannot be reached: {error}") from error
        except (MoonserveError, asyncio.CancelledError):
            await _discard(connection)
            raise
        return connection

    async def _open(self, connection: Connection) -> None:
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
                ssl_shutdown_timeout=None if self._tls is None else GOODBYE_S,
            )


async def _discard(connection: Connection) -> None:
    """Closes a connection whose setup failed and waits until its socket is released."""
    if connection.opened:
        connection.close()
        await connection.gone.wait()


class UnaryCall:
    """Callable that a stub uses for one method of a channel."""

    def __init__(
        self,
        channel: LeanChannel,
        path: str,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
    ) -> None:
        self._channel = channel
        self._path = path
        self._serialize = serialize
        self._deserialize = deserialize

    async def __call__(
        self, request: Any, *, timeout: float, metadata: object = None, wait_for_ready: bool = False
    ) -> Any:
        """Calls the method. gRPC's `wait_for_ready` is ignored: only processes that serve publish a lean address."""
        give_up_at = asyncio.get_running_loop().time() + timeout
        payload = self._serialize(request)
        connection = self._channel.live() or await self._channel.connect(give_up_at)
        return self._deserialize(await exchange(connection, self._path, payload, give_up_at))


async def exchange(connection: Connection, path: str, payload: bytes, give_up_at: float) -> bytes:
    """Makes one call over a connection and returns the serialized reply. Cancellation also cancels the handler."""
    call_id, reply = connection.begin(path, payload, give_up_at)
    try:
        return await reply
    except asyncio.CancelledError:
        connection.give_up(call_id)
        raise
