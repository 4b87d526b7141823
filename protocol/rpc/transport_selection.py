"""Channel to one `host:port` that makes calls over sockets if the peer serves them there, and over gRPC otherwise.

A peer names its socket addresses in the metadata of each unary gRPC reply. The first call to a peer therefore uses
gRPC, and a socket is dialled in the background. Unary calls do not wait for it; streams do, because they last. Without
a socket, for example after a restart of the peer, calls use gRPC, whose replies name the new addresses. A call fails
with the same error classes over either transport.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from moonserve.protocol.errors import DeadlineExceeded, MoonserveError, PeerLost
from moonserve.protocol.process.machine import host_identity
from moonserve.protocol.process.tls import Certificates
from moonserve.protocol.rpc.socket_client import AsyncChannel, AsyncConnection, Deserializer, Serializer, exchange

log = logging.getLogger(__name__)

LEAN_HEADER = "x-moonserve-lean"
DIAL_S = 30.0
"""Limit of one attempt to dial."""
STREAM_WAITS_S = 1.0
"""Time that a stream waits for an attempt to dial. After that it uses gRPC until its end."""
RETRY_S = 1.0
"""Least time between the starts of two attempts to dial."""
# A DeadlineExceeded this close to the deadline counts as the caller's own: its clock and timers differ by milliseconds.
_AT_DEADLINE_S = 0.01


Metadata = tuple[tuple[str, str], ...]


def address_metadata(tcp: str, unix: str) -> Metadata:
    """Returns metadata of gRPC replies that name a server's socket addresses, `unix` for processes on its host."""
    return ((LEAN_HEADER, f"{host_identity()} {unix} {tcp}"),)


def socket_address(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Returns the socket address that this process should dial, or None if the reply's metadata name none."""
    for key, value in metadata:
        if key == LEAN_HEADER and isinstance(value, str) and value.count(" ") == 2:
            host, unix, tcp = value.split(" ")
            return unix if host == host_identity() else tcp
    return None


class RoutedChannel:
    """The part of a `grpc.aio.Channel` that generated stubs need. It belongs to one event loop."""

    def __init__(self, grpc_channel: grpc.aio.Channel, cluster_token: str, tls: Certificates | None) -> None:
        self._grpc = grpc_channel
        self._token = cluster_token
        self._tls = tls
        self._socket_channel: AsyncChannel | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._dial_again_at = 0.0
        self._dial_failed = False
        """True if the last attempt failed. Only the first of several consecutive failures is logged at level INFO."""
        self._closed = False
        self.stream_unary = grpc_channel.stream_unary
        self.stream_stream = grpc_channel.stream_stream

    def unary_unary(
        self, path: str, request_serializer: Serializer, response_deserializer: Deserializer, **options: Any
    ) -> Callable[..., Awaitable[Any]]:
        over_grpc = self._grpc.unary_unary(path, request_serializer, response_deserializer, **options)

        async def call(request: Any, *, timeout: float, metadata: Any, wait_for_ready: bool = False) -> Any:
            connection = self.connection_for(path)
            if connection is not None:
                payload = request_serializer(request)
                return response_deserializer(await _exchange_within(connection, path, payload, timeout))
            running = over_grpc(request, timeout=timeout, metadata=metadata, wait_for_ready=wait_for_ready)
            reply = await running
            self.dial_if_named(await running.trailing_metadata())
            return reply

        return call

    def unary_stream(
        self, path: str, request_serializer: Serializer, response_deserializer: Deserializer, **options: Any
    ) -> "Callable[..., RoutedStream]":
        over_grpc = self._grpc.unary_stream(path, request_serializer, response_deserializer, **options)

        def call(request: Any, *, metadata: Any) -> RoutedStream:
            def call_grpc() -> Any:
                return over_grpc(request, metadata=metadata)

            return RoutedStream(self, path, request_serializer(request), response_deserializer, call_grpc)

        return call

    async def dialled_for(self, path: str) -> AsyncConnection | None:
        """Waits for a running attempt to dial, for at most STREAM_WAITS_S, then returns like `connection_for`."""
        if self._dialling is not None:
            await asyncio.wait({self._dialling}, timeout=STREAM_WAITS_S)
        return self.connection_for(path)

    def connection_for(self, path: str) -> AsyncConnection | None:
        """Returns the socket connection, or None if there is none or the peer does not serve this method over it.

        Raises PeerLost after `close`.
        """
        if self._closed:
            raise PeerLost("the channel was closed")
        live = None if self._socket_channel is None else self._socket_channel.live()
        return live if live is not None and live.offers(path) else None

    def dial_if_named(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Dials the socket address that a gRPC reply named. No-op with a connection or an attempt within RETRY_S."""
        is_connected = self._socket_channel is not None and self._socket_channel.live() is not None
        now = asyncio.get_running_loop().time()
        if self._closed or is_connected or self._dialling is not None or now < self._dial_again_at:
            return
        address = socket_address(metadata)
        if address is not None:
            self._dial_again_at = now + RETRY_S
            self._dialling = asyncio.create_task(self._dial(address, now + DIAL_S))

    async def close(self, grace: float | None = None) -> None:
        """Closes both transports and cancels an attempt to dial. Calls in flight fail with PeerLost."""
        self._closed = True
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait([self._dialling])
        await self._close_socket_channel()
        await self._grpc.close(grace)

    async def _dial(self, address: str, deadline_at: float) -> None:
        try:
            await self._close_socket_channel()
            channel = self._socket_channel = AsyncChannel(address, self._token, self._tls)
            await channel.connect(deadline_at)
            self._dial_failed = False
        except MoonserveError as error:
            level = logging.DEBUG if self._dial_failed else logging.INFO
            log.log(level, "cannot dial the peer's socket, calls continue over gRPC: %s", error)
            self._dial_failed = True
        finally:
            self._dialling = None

    async def _close_socket_channel(self) -> None:
        """Closes the socket channel. Before a dial it has no calls in flight: they ended when its connection broke."""
        channel, self._socket_channel = self._socket_channel, None
        if channel is not None:
            await channel.close()


class RoutedStream:
    """Server stream, to be iterated once. A caller that stops before the end must call `cancel`."""

    def __init__(
        self,
        channel: RoutedChannel,
        path: str,
        payload: bytes,
        deserialize: Callable[[bytes], Any],
        call_grpc: Callable[[], Any],
    ) -> None:
        self._channel = channel
        self._path = path
        self._payload = payload
        self._deserialize = deserialize
        self._call_grpc = call_grpc
        self._cancel: Callable[[], object] = lambda: None  # until the iteration starts

    def cancel(self) -> None:
        """Cancels the handler. No-op if the stream has ended."""
        self._cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        connection = await self._channel.dialled_for(self._path)
        if connection is None:
            call = self._call_grpc()
            self._cancel = call.cancel
            async for message in call:
                yield message
            return
        call_id, arriving = connection.begin_stream(self._path, self._payload)
        self._cancel = partial(connection.abandon_call, call_id)
        while (arrived := await arriving.get()) is not None:
            if isinstance(arrived, MoonserveError):
                raise arrived
            try:
                message = self._deserialize(arrived)
            except DecodeError as error:  # over gRPC this is an error of the call, too
                raise PeerLost(f"the peer sent a malformed message: {error}") from error
            yield message


async def _exchange_within(connection: AsyncConnection, path: str, payload: bytes, timeout_s: float) -> bytes:
    """Makes one call over a connection. Raises PeerLost after `timeout_s`, as a call over gRPC does."""
    loop = asyncio.get_running_loop()
    deadline_at = loop.time() + timeout_s
    try:
        return await exchange(connection, path, payload, deadline_at)
    except DeadlineExceeded as error:
        if loop.time() < deadline_at - _AT_DEADLINE_S:  # raised by the handler
            raise
        raise PeerLost(f"deadline_exceeded: {error.message}") from error
