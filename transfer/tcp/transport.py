"""The `tcp` transport: scatter lists sent from and received into registered memory, between any two hosts.

One rail per local address; several connections per pair of rails where one cannot fill the link.
"""

import errno
import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from moonserve.protocol.errors import ConfigError, Incompatible, PeerLost
from moonserve.protocol.process.tls import Certificates, load_certificates
from moonserve.transfer.memory.segments import Segment
from moonserve.transfer.paths.hardware_discovery import local_tcp_rails
from moonserve.transfer.paths.peer_address import Address, Rail
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.tcp.exchange import TcpSession, TcpTarget
from moonserve.transfer.tcp.session import StreamSession, authenticate
from moonserve.transfer.tcp.target import Acceptor, StreamTarget
from moonserve.transfer.tcp.tls import TlsConnection
from moonserve.transfer.transport_interface import Dial, ServedState

T = TypeVar("T")

_KEEPALIVE = {  # a vanished host is noticed within 20 s even on an idle connection
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 2,
    socket.TCP_USER_TIMEOUT: 20_000,
}


_LOCAL_BUFFER_BYTES = 2 << 20
"""Socket buffers within a host. The kernel's automatic sizing ends up with buffers that exceed the cache (LOG.md)."""


class TcpTransport:
    name = "tcp"

    def __init__(self) -> None:
        self._certificates: Certificates | None = None
        """Certificates, loaded by `listen`; None: no TLS."""

    def listen(self, state: ServedState) -> Sequence[Acceptor]:
        """Listens on every TCP rail. Raises ConfigError if an address cannot be bound or dialled by peers, or for TLS
        files."""
        files = state.options.tls
        self._certificates = None if files is None else load_certificates(files)
        rails = local_tcp_rails(state.options.tcp_rails or (state.options.host,))
        return listen_on_all(rails, lambda rail: self._listen_on(rail, state))

    def _listen_on(self, rail: Rail, state: ServedState) -> Acceptor:
        """Listens on a rail whose endpoint has no port yet."""
        listener, endpoint = listen_on(rail.endpoint)
        rail = replace(rail, endpoint=endpoint)
        return Acceptor(listener, rail, state, partial(self._target, state))

    def reachable(self, address: Address) -> bool:
        return self.name in address.rails

    def connect(self, dial: Dial) -> StreamSession:
        _require_same_tls(dial)
        connection = open_connection(dial, self._encrypted)
        make = StreamSession if dial.options.tls else TcpSession
        return make(dial, connection, authenticate(connection, dial))

    def _target(self, state: ServedState, sock: socket.socket) -> StreamTarget:
        tune(sock, sock.getpeername()[0])
        if self._certificates is None:
            return TcpTarget(Connection(sock), state)
        return StreamTarget(TlsConnection(sock, self._certificates.target), state)

    def _encrypted(self, sock: socket.socket, ip: str) -> Connection:
        if self._certificates is None:
            return Connection(sock)
        return TlsConnection(sock, self._certificates.initiator, peer_ip=ip)

    def segment_added(self, segment: Segment) -> None:
        """Does nothing: tcp registers no memory."""

    def segment_removed(self, segment: Segment) -> None:
        """Does nothing: tcp registers no memory."""


def listen_on_all(rails: Iterable[T], listen: Callable[[T], Acceptor]) -> list[Acceptor]:
    """Listens on every rail, or on none if one raises ConfigError."""
    acceptors: list[Acceptor] = []
    try:
        for rail in rails:
            acceptors.append(listen(rail))  # noqa: PERF401 - closed below when a later one fails
    except ConfigError:
        for acceptor in acceptors:
            acceptor.close()
        raise
    return acceptors


def listen_on(ip: str) -> tuple[socket.socket, str]:
    """Listens on a port chosen by the kernel. Returns the listener and its endpoint. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        listener = socket.create_server((ip, 0), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {ip}: {error}") from error
    port = listener.getsockname()[1]
    return listener, f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def open_connection(dial: Dial, make: Callable[[socket.socket, str], Connection]) -> Connection:
    """Starts to connect from the local rail to the remote one. `make` gets the socket and the remote IP address. Raises
    PeerLost."""
    host, _, port = dial.remote.endpoint.rpartition(":")
    try:
        ip, port_number = ipaddress.ip_address(host.strip("[]")), int(port)
    except ValueError as error:  # published addresses are numeric: no resolver to wait for
        raise PeerLost(f"not a numeric address: {dial.remote.endpoint!r}") from error
    sock = socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET)
    connection = make(sock, str(ip))
    try:
        _bind_to_rail(sock, dial.local)
        tune(sock, str(ip))  # before connecting: the handshake fixes the largest window
        code = sock.connect_ex((str(ip), port_number))
    except OverflowError:
        code = errno.EINVAL
    except OSError as error:
        code = error.errno or errno.EIO
    if code not in (0, errno.EINPROGRESS):
        connection.close()
        reason = errno.errorcode.get(code, str(code))
        raise PeerLost(f"cannot connect to {dial.remote.endpoint}: {reason}")
    return connection


def _require_same_tls(dial: Dial) -> None:
    """Checks before dialling that both ends agree on TLS, as the connection would only carry unreadable bytes. Raises
    Incompatible."""
    if dial.address.tls and not dial.options.tls:
        raise Incompatible(
            "the peer uses TLS on tcp and this process does not: give this process a TLS certificate, key and authority"
        )
    if dial.options.tls and not dial.address.tls:
        raise Incompatible(
            "this process uses TLS on tcp and the peer does not: give the peer a TLS certificate, key and authority"
        )


def _bind_to_rail(sock: socket.socket, rail: Rail) -> None:
    sock.bind((rail.endpoint.rpartition(":")[0].strip("[]"), 0))


def tune(sock: socket.socket, peer_ip: str) -> None:
    """Sets the options of a bound socket. A peer in another network namespace of this machine may be distant."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if peer_ip == sock.getsockname()[0] or ipaddress.ip_address(peer_ip).is_loopback:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOCAL_BUFFER_BYTES)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
