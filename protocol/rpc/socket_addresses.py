"""Addresses and sockets of socket RPC: `lean://host:port`, `lean+tls://host:port`, `lean+unix://name`.

Unix names are abstract: they are private to a network namespace and vanish with their process. They connect processes
of the same host only, at two thirds of TCP's latency.
"""

import secrets
import socket
from contextlib import suppress

from moonserve.protocol.errors import ConfigError, Incompatible, InvalidRequest
from moonserve.protocol.process.tls import Certificates

TCP = "lean://"
TLS = "lean+tls://"
UNIX = "lean+unix://"
_BACKLOG = 1024
# A vanished host is detected within this time, with calls in flight (user timeout) and without (keepalive). A stopped
# process is only detected at its callers' deadlines, since its kernel keeps answering.
_VANISHED_S = 10
_PROBES = 3

DialTarget = tuple[socket.AddressFamily, str | tuple[str, int]]


def is_lean(address: str) -> bool:
    return address.startswith((TCP, TLS, UNIX))


def require_same_tls(address: str, tls: Certificates | None) -> None:
    """Raises Incompatible if only one of `address` and this process speaks TLS. Unix sockets never use it."""
    if address.startswith(TLS) and tls is None:
        raise Incompatible(
            f"{address} speaks TLS and this process does not: start it with --tls-certificate, --tls-key and "
            "--tls-authority"
        )
    if address.startswith(TCP) and tls is not None:
        raise Incompatible(
            f"this process speaks TLS and {address} does not: start that one with --tls-certificate, --tls-key and "
            "--tls-authority"
        )


def parse_address(address: str) -> DialTarget:
    """Returns the address family and the argument of `connect`. Raises InvalidRequest if the address is malformed."""
    if address.startswith(UNIX) and len(address) > len(UNIX):
        return socket.AF_UNIX, "\0" + address.removeprefix(UNIX)
    host, _, port = address.removeprefix(TCP).removeprefix(TLS).rpartition(":")
    is_port = port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16
    if not address.startswith((TCP, TLS)) or not host or not is_port:
        raise InvalidRequest(
            f"{address!r} is not a lean address; write lean://host:port, lean+tls://… or lean+unix://name"
        )
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    return family, (host.strip("[]"), int(port))


def listen_tcp(host: str, port: int, scheme: str = TCP) -> tuple[socket.socket, str]:
    """Returns a listening socket and its address to publish. Raises ConfigError if it cannot listen there."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    return listener, f"{scheme}{host}:{listener.getsockname()[1]}"


def listen_unix() -> tuple[socket.socket, str]:
    """Returns a listening Unix socket with a new random name, and its address."""
    name = f"moonserve-lean-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(_BACKLOG)
    return listener, UNIX + name


def tune_socket(sock: socket.socket) -> None:
    """Sets options for low latency and the detection of vanished peers; no-op for a Unix socket."""
    if sock.family == socket.AF_UNIX:
        return
    with suppress(OSError):  # the peer has disconnected already; the next read reports it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _VANISHED_S // 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _VANISHED_S // 2 // _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED_S * 1000)
