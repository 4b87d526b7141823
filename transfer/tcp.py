"""The `tcp` transport: scatter lists straight from and into registered memory, any two hosts."""

from __future__ import annotations

import errno
import socket

from protocol.errors import ConfigError, PeerLost
from transfer.acceptor import Acceptor
from transfer.address import Address
from transfer.base import Dial, Hosted
from transfer.connection import Connection
from transfer.stream import StreamSession, authenticate
from transfer.target import StreamTarget

_WILDCARDS = ("", "0.0.0.0", "::")
_KEEPALIVE = {  # a host that vanished is noticed within 20 s even by an idle connection
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 2,
    socket.TCP_USER_TIMEOUT: 20_000,
}


class TcpTransport:
    name = "tcp"

    def listen(self, host: str, hosted: Hosted) -> Acceptor:
        """Raises ConfigError when `host` cannot be bound or is no address that peers can dial."""
        if host in _WILDCARDS:
            raise ConfigError(f"transfer host {host!r}: give the address that peers can reach")
        try:
            family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(where[:2], family=family)
        except OSError as error:
            raise ConfigError(f"transfer host {host!r}: {error}") from error
        port = listener.getsockname()[1]

        def target(sock: socket.socket) -> StreamTarget:
            _tune(sock)
            return StreamTarget(Connection(sock), hosted)

        return Acceptor(listener, f"{host}:{port}", hosted.credentials, target)

    def reachable(self, address: Address) -> bool:
        return self.name in address.endpoints

    def connect(self, dial: Dial) -> StreamSession:
        host, _, port = dial.address.endpoints[self.name].rpartition(":")
        try:
            family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise PeerLost(f"unknown host {host!r}") from error
        sock = socket.socket(family, socket.SOCK_STREAM)
        _tune(sock)
        connection = Connection(sock)
        if (code := sock.connect_ex(where)) not in (0, errno.EINPROGRESS):
            connection.close()
            raise PeerLost(f"cannot connect to {host}:{port}: {errno.errorcode.get(code, code)}")
        authenticate(connection, dial)
        return StreamSession(self.name, connection)


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
