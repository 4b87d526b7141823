"""gRPC servers that authenticate callers and translate errors, and shared channels with deadlines.

Every unary call has a deadline, and every call carries the cluster token in its metadata. A `MoonserveError` raised by
a handler arrives at the caller as the same class. Any other exception is logged with its traceback and arrives as the
base class, without internal details. Calls of services added with `add_socket_service` use sockets once the caller
knows the address (`protocol.rpc.transport_selection`).
"""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

from moonserve.protocol.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Incompatible,
    InvalidRequest,
    MoonserveError,
    NoWorker,
    Overloaded,
    PeerLost,
    StaleLease,
    Unauthenticated,
)
from moonserve.protocol.pb import common_pb2
from moonserve.protocol.process.tls import Certificates, grpc_failure
from moonserve.protocol.rpc import socket_addresses
from moonserve.protocol.rpc.frames import MAX_MESSAGE_BYTES
from moonserve.protocol.rpc.socket_client import AsyncChannel
from moonserve.protocol.rpc.socket_server import SocketServer
from moonserve.protocol.rpc.socket_server_connection import ConnectionTakeover
from moonserve.protocol.rpc.transport_selection import Metadata, RoutedChannel, address_metadata
from moonserve.protocol.rpc.wire import failure_from_wire, handler_failure

TOKEN_HEADER = "x-moonserve-token"
FAILURE_HEADER = "x-moonserve-failure-bin"

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Detects a silent peer without traffic; see gRPC's keepalive guide.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The longer of this and the timeout above counts. With the default of a minute, a stopped process kept its streams
    # for that long. It is twice the timeout above, since busy machines answer late.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
    # With port reuse, two servers on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
    # Reconnects to a restarted peer soon, rather than after gRPC's default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Peers are reached directly, not through an HTTP proxy from the environment.
    ("grpc.enable_http_proxy", 0),
]

_STATUS_OF: list[tuple[type[MoonserveError], grpc.StatusCode]] = [
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NoWorker, grpc.StatusCode.UNAVAILABLE),
    (StaleLease, grpc.StatusCode.FAILED_PRECONDITION),
    (Incompatible, grpc.StatusCode.FAILED_PRECONDITION),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Cancelled, grpc.StatusCode.CANCELLED),
]

Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]
"""Context of a call that a servicer answers."""


class RpcServer:
    """gRPC server of one process, with a server of socket RPC next to it for services that need it.

    `lean_address` and `lean_unix_address` are the socket server's addresses for other hosts and for this host. They are
    empty before `start` and without a socket server.
    """

    def __init__(self, cluster_token: str, tls: Certificates | None = None) -> None:
        """Creates the server. With `tls`, clients must show a certificate of its authority, except by Unix socket."""
        self.lean_address = ""
        self.lean_unix_address = ""
        self._token = cluster_token
        self._tls = tls
        self._socket_server: SocketServer | None = None
        self._auth = _AuthInterceptor(cluster_token)
        self._server = grpc.aio.server(options=_OPTIONS, interceptors=[self._auth])

    @property
    def grpc(self) -> grpc.aio.Server:
        """Server for the generated `add_…Servicer_to_server` functions, which must be called before `start`."""
        return self._server

    def add_socket_service(self, service: str, servicer: object) -> None:
        """Serves the methods of a service (its name in the .proto file) over sockets as well."""
        if self._socket_server is None:
            self._socket_server = SocketServer(self._token, self._tls)
        self._socket_server.add(service, servicer)

    def add_takeover(self, takeover: ConnectionTakeover) -> None:
        """Lets socket clients transfer their connection to another protocol. Call it after `add_socket_service`."""
        assert self._socket_server is not None
        self._socket_server.add_takeover(takeover)

    async def start(self, host: str, port: int) -> str:
        """Listens and returns `host:port`. The system chooses the port if `port` is 0.

        Raises ConfigError if the port is taken or if peers cannot dial the address.
        """
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"--host {host!r} would be published to peers, which cannot dial it; give an address of this machine"
            )
        try:
            bound = self._bind(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: port in use or not permitted; choose another --port"
            ) from error
        if self._socket_server is not None:
            self.lean_address, self.lean_unix_address = await self._socket_server.start(host)
            self._auth.reply_metadata = address_metadata(self.lean_address, self.lean_unix_address)
        await self._server.start()
        return f"{host}:{bound}"

    @contextlib.asynccontextmanager
    async def serving(self, host: str, port: int, grace_s: float) -> AsyncIterator[str]:
        """Serves within the block: `start`, whose address it yields, and `stop`."""
        address = await self.start(host, port)
        try:
            yield address
        finally:
            await self.stop(grace_s)

    def _bind(self, address: str) -> int:
        if self._tls is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, self._tls.grpc_server())

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls and cancels running ones after `grace_s`."""
        if self._socket_server is None:
            await self._server.stop(grace_s)
        else:
            await asyncio.gather(self._server.stop(grace_s), self._socket_server.stop(grace_s))


class _AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Checks the cluster token, translates errors of handlers and publishes the socket addresses to callers."""

    def __init__(self, cluster_token: str) -> None:
        self.reply_metadata: Metadata | None = None
        self._token = cluster_token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None:  # no such method: gRPC answers UNIMPLEMENTED
            return None
        presented = dict(details.invocation_metadata or ()).get(TOKEN_HEADER, "")
        allowed = hmac.compare_digest(str(presented).encode(), self._token)
        if handler.unary_unary:
            guarded = _guard_unary(handler.unary_unary, allowed, self.reply_metadata)
            return handler._replace(unary_unary=guarded)
        return handler._replace(unary_stream=_guard_stream(handler.unary_stream, allowed))


def _guard_unary(
    behavior: Callable[..., Awaitable[Any]], allowed: bool, reply_metadata: Metadata | None
) -> Callable[..., Any]:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            if not allowed:
                raise Unauthenticated("wrong or missing cluster token")
            reply = await behavior(request, context)
            if reply_metadata is not None:
                context.set_trailing_metadata(reply_metadata)
            return reply
        except Exception as error:  # every error of a handler must reach the caller as a failure
            await _abort(context, error, request)

    return guarded


def _guard_stream(behavior: Callable[..., AsyncIterator[Any]], allowed: bool) -> Callable[..., Any]:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            if not allowed:
                raise Unauthenticated("wrong or missing cluster token")
            async for message in behavior(request, context):
                yield message
        except Exception as error:  # as in `_guard_unary`
            await _abort(context, error, request)

    return guarded


async def _abort(context: Context, error: Exception, request: Any) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    failure = handler_failure(error, request)
    await context.abort(
        next((status for cls, status in _STATUS_OF if isinstance(error, cls)), grpc.StatusCode.INTERNAL),
        failure.message,
        trailing_metadata=((FAILURE_HEADER, failure.SerializeToString()),),
    )


class Channels(contextlib.AbstractAsyncContextManager["Channels"]):
    """Channels to other processes, one per address, opened on first use and closed together. `async with` closes them.

    With `tls`, peers must show a certificate of its authority, and no peer is dialled without TLS.
    """

    def __init__(self, cluster_token: str, tls: Certificates | None = None) -> None:
        self.cluster_token = cluster_token
        self.tls = tls
        self._metadata = ((TOKEN_HEADER, cluster_token),)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def to(self, address: str) -> grpc.aio.Channel:
        """Returns the channel to `host:port` or to a `lean://` address, for the constructor of a generated stub.

        Raises InvalidRequest for a malformed `lean://` address, and Incompatible if only one end of it uses TLS.
        """
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open(address)
        return channel

    def _open(self, address: str) -> grpc.aio.Channel:
        if socket_addresses.is_lean(address):
            # An AsyncChannel has all that stubs need of a channel; it refuses streams.
            return cast(grpc.aio.Channel, AsyncChannel(address, self.cluster_token, self.tls))
        if self.tls is None:
            channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            options = [*_OPTIONS, *self.tls.grpc_options]
            channel = grpc.aio.secure_channel(address, self.tls.grpc_channel(), options=options)
        return cast(grpc.aio.Channel, RoutedChannel(channel, self.cluster_token, self.tls))

    async def call(
        self,
        method: Callable[..., Awaitable[Reply]],
        request: Any,
        *,
        timeout_s: float,
        wait_for_ready: bool = False,
    ) -> Reply:
        """Makes a unary call and returns the reply. Raises the MoonserveError of the handler, or PeerLost."""
        try:
            return await method(
                request,
                timeout=timeout_s,
                metadata=self._metadata,
                wait_for_ready=wait_for_ready,
            )
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The caller was not cancelled: `forget` closed the channel, and gRPC cancels a closed channel's calls.
            raise PeerLost("the channel was closed") from error

    async def stream(self, method: Callable[..., Any], request: Any) -> AsyncIterator[Any]:
        """Yields the messages of a server stream without a deadline. Raises PeerLost if the peer ends (keepalive).

        Closing the iterator cancels the call. The first call to a peer uses gRPC.
        """
        call = method(request, metadata=self._metadata)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from error
        finally:
            call.cancel()

    async def forget(self, address: str) -> None:
        """Closes the channel to a peer that has left."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close(None)

    async def close(self) -> None:
        for address in list(self._channels):
            await self.forget(address)


def error_of_call(error: grpc.aio.AioRpcError) -> MoonserveError:
    """Returns the error that the peer raised. If the call reached no handler, that is PeerLost or an error of TLS."""
    trailing: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    for key, value in trailing:
        if key == FAILURE_HEADER and isinstance(value, bytes):
            return failure_from_wire(common_pb2.Failure.FromString(value))
    return grpc_failure(error.details() or "") or PeerLost(f"{error.code().name.lower()}: {error.details()}")
