"""Lean server: its listening sockets, its set of connections and its shutdown. `served` handles one connection.

Clients without a completed handshake are limited in number and time, so that strangers cannot block peers. With TLS,
clients over TCP first show a certificate. The Unix socket, whose traffic stays on the host, requires only the token.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from protocol.lean import served, sockets
from protocol.lean.eager import EagerStart
from protocol.lean.served import HANDSHAKE_S, HandOver, Method, ServedConnection
from protocol.timer import set_within
from protocol.tls import GOODBYE_S, Certificates

log = logging.getLogger(__name__)

# A handshake takes milliseconds. A starting cluster can have this many at once; more do not come from peers.
MAX_STRANGERS = 256
# Cancelled handlers end within this time, because none of them blocks.
_CANCELLED_S = 1.0


class LeanServer:
    """Server for lean calls. `add` services first, then `start`; both in the event loop's thread."""

    def __init__(self, cluster_token: str, tls: Certificates | None = None) -> None:
        self._token = cluster_token
        self._tls = tls
        self._methods: list[Method | HandOver] = []
        self._eager: EagerStart | None = None
        self._listeners: list[asyncio.Server] = []
        self._strangers: dict[ServedConnection, None] = {}  # the oldest first
        self._connections: set[ServedConnection] = set()
        self._deserted = asyncio.Event()
        self._deserted.set()

    def add(self, service: str, servicer: object) -> None:
        """Serves the methods of `service` (its name in the .proto file) that `servicer` implements."""
        assert self._eager is None, "clients are told the methods when they connect"
        self._methods.extend(served.methods_of(served.service_descriptor(service), servicer))

    def add_hand_over(self, hand_over: HandOver) -> None:
        """Lets clients have their connection handed over by calling `hand_over.path`."""
        assert self._eager is None, "clients are told the methods when they connect"
        assert self._tls is None, "what is encrypted cannot be handed over"
        self._methods.append(hand_over)

    async def start(self, host: str, port: int = 0) -> tuple[str, str]:
        """Listens and returns the TCP and the Unix address. Raises ConfigError if the port is taken."""
        self._eager = EagerStart()
        scheme = sockets.TCP if self._tls is None else sockets.TLS
        tcp, tcp_address = sockets.listen_tcp(host, port, scheme)
        unix, unix_address = sockets.listen_unix()
        await self._listen(tcp)
        await self._listen(unix)
        return tcp_address, unix_address

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls and cancels running ones after `grace_s`."""
        for listener in self._listeners:
            listener.close()
        for stranger in list(self._strangers):
            stranger.abort()
        for connection in list(self._connections):
            connection.finish()
        if not await set_within(self._deserted, grace_s):
            await self._end_calls()
        if self._eager is not None:
            await self._eager.close()

    async def _end_calls(self) -> None:
        tasks = [task for connection in self._connections for task in connection.tasks]
        for connection in list(self._connections):
            connection.abort()
        await self._deserted.wait()
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
                ssl_shutdown_timeout=None if self._tls is None else GOODBYE_S,
            )
        self._listeners.append(server)

    def _make_connection(self) -> ServedConnection:
        assert self._eager is not None, "it has been started"
        return ServedConnection(self._methods, self._token, self._eager, self)

    def entered(self, connection: ServedConnection) -> None:
        """Registers a connection. Above the limit, the oldest without a handshake is closed: a peer's ends sooner."""
        self._strangers[connection] = None
        self._connections.add(connection)
        self._deserted.clear()
        if len(self._strangers) > MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            log.warning("more than %d connections without a handshake", MAX_STRANGERS)
            del self._strangers[oldest]
            oldest.abort()

    def proven(self, connection: ServedConnection) -> None:
        self._strangers.pop(connection, None)

    def left(self, connection: ServedConnection) -> None:
        self._strangers.pop(connection, None)
        self._connections.discard(connection)
        if not self._connections:
            self._deserted.set()
