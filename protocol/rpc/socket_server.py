"""Server of socket RPC: listening sockets, set of connections, shutdown. `socket_server_connection` handles one each.

Clients without a completed handshake are limited in number and time, so that foreign clients cannot block peers. With
TLS, clients over TCP first show a certificate. The Unix socket, whose traffic stays on the host, requires only the
token.
"""

import asyncio
import logging
import socket

from moonserve.protocol.process.event_loop import wait_event
from moonserve.protocol.process.tls import CLOSE_TIMEOUT_S, Certificates
from moonserve.protocol.rpc import socket_addresses
from moonserve.protocol.rpc.eager_tasks import EagerStarter
from moonserve.protocol.rpc.socket_server_connection import (
    HANDSHAKE_S,
    ConnectionTakeover,
    Method,
    ServerConnection,
    methods_of,
)

log = logging.getLogger(__name__)

# A handshake takes milliseconds. A starting cluster can have this many at once; more do not come from peers.
MAX_PENDING_HANDSHAKES = 256
# Cancelled handlers end within this time, because none of them blocks.
_CANCELLED_S = 1.0


class SocketServer:
    """Server for calls over sockets. `add` services first, then `start`; both in the event loop's thread."""

    def __init__(self, cluster_token: str, tls: Certificates | None = None) -> None:
        self._token = cluster_token
        self._tls = tls
        self._methods: list[Method | ConnectionTakeover] = []
        self._eager: EagerStarter | None = None
        self._listeners: list[asyncio.Server] = []
        self._pending_handshakes: dict[ServerConnection, None] = {}  # the oldest first
        self._connections: set[ServerConnection] = set()
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    def add(self, service: str, servicer: object) -> None:
        """Serves the methods of `service` (its name in the .proto file) that `servicer` implements."""
        assert self._eager is None, "the handshake sends the list of methods, so it must be complete before `start`"
        self._methods.extend(methods_of(service, servicer))

    def add_takeover(self, takeover: ConnectionTakeover) -> None:
        """Lets clients transfer their connection to another protocol by calling `takeover.path`."""
        assert self._eager is None, "the handshake sends the list of methods, so it must be complete before `start`"
        assert self._tls is None, "an encrypted connection cannot be taken over"
        self._methods.append(takeover)

    async def start(self, host: str, port: int = 0) -> tuple[str, str]:
        """Listens and returns the TCP and the Unix address. Raises ConfigError if the port is taken."""
        self._eager = EagerStarter()
        scheme = socket_addresses.TCP if self._tls is None else socket_addresses.TLS
        tcp, tcp_address = socket_addresses.listen_tcp(host, port, scheme)
        unix, unix_address = socket_addresses.listen_unix()
        await self._listen(tcp)
        await self._listen(unix)
        return tcp_address, unix_address

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls and cancels running ones after `grace_s`."""
        for listener in self._listeners:
            listener.close()
        for connection in list(self._pending_handshakes):
            connection.abort()
        for connection in list(self._connections):
            connection.finish()
        if not await wait_event(self._all_closed, grace_s):
            await self._end_calls()
        if self._eager is not None:
            await self._eager.close()

    async def _end_calls(self) -> None:
        tasks = [task for connection in self._connections for task in connection.tasks]
        for connection in list(self._connections):
            connection.abort()
        await self._all_closed.wait()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCELLED_S)

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if listener.family == socket.AF_UNIX:
            server = await loop.create_unix_server(self._make_connection, sock=listener)
        else:
            server = await loop.create_server(
                self._make_connection,
                sock=listener,
                ssl=None if self._tls is None else self._tls.target,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_S,
                ssl_shutdown_timeout=None if self._tls is None else CLOSE_TIMEOUT_S,
            )
        self._listeners.append(server)

    def _make_connection(self) -> ServerConnection:
        assert self._eager is not None, "start() creates it"
        return ServerConnection(self._methods, self._token, self._eager, self)

    def add_connection(self, connection: ServerConnection) -> None:
        """Registers a connection. Above the limit, the oldest without a handshake is closed: a peer's ends sooner."""
        self._pending_handshakes[connection] = None
        self._connections.add(connection)
        self._all_closed.clear()
        if len(self._pending_handshakes) > MAX_PENDING_HANDSHAKES:
            oldest = next(iter(self._pending_handshakes))
            log.warning("more than %d connections without a handshake", MAX_PENDING_HANDSHAKES)
            del self._pending_handshakes[oldest]
            oldest.abort()

    def on_authenticated(self, connection: ServerConnection) -> None:
        self._pending_handshakes.pop(connection, None)

    def remove_connection(self, connection: ServerConnection) -> None:
        self._pending_handshakes.pop(connection, None)
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()
