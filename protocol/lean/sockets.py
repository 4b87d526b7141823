"""Addresses of lean servers and the sockets behind them: `lean://host:port`, `lean+tls://host:port`, `lean+unix://name`.

The Unix names are abstract: private to a network namespace, gone with their process. They reach processes of the same
host only, at two thirds of TCP's latency.
"""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

from protocol.errors import ConfigError, Incompatible, InvalidRequest
from protocol.tls import Certificates

TCP = "lean://"
TLS = "lean+tls://"
UNIX = "lean+unix://"
_BACKLOG = 1024
# A host that vanished is noticed within this time, with calls under way (user timeout) and without (keepalive); a
# stopped process only at its callers' deadlines, since its kernel goes on answering.
_VANISHED_S = 10
_PROBES = 3

SocketAddress = tuple[socket.AddressFamily, str | tuple[str, int]]


def is_lean(address: str) -> bool:
    return address.startswith((TCP, TLS, UNIX))


def require_same_tls(address: str, tls: Certificates | None) -> None:
    """An address says whether TLS is spoken there. Raises Incompatible where only one end has it; what stays within the
    host has none."""
    if address.startswith(TLS) and tls is None:
        raise Incompatible(
            f"{address} speaks TLS and this process does not: give it --tls-certificate, --tls-key and --tls-authority"
        )
    if address.startswith(TCP) and tls is not None:
        raise Incompatible(
            f"this process speaks TLS and {address} does not: give it --tls-certificate, --tls-key and --tls-authority"
        )


def parse(address: str) -> SocketAddress:
    """Family and address as `connect` wants them. Raises InvalidRequest."""
    if address.startswith(UNIX) and len(address) > len(UNIX):
        return socket.AF_UNIX, "\0" + address.removeprefix(UNIX)
    host, _, port = address.removeprefix(TCP).removeprefix(TLS).rpartition(":")
    is_port = port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16
    if not address.startswith((TCP, TLS)) or not host or not is_port:
        raise InvalidRequest(f"{address!r} is no address of a lean server")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    return family, (host.strip("[]"), int(port))


def listen_tcp(host: str, port: int, scheme: str = TCP) -> tuple[socket.socket, str]:
    """A listening socket and the address to publish. Raises ConfigError when the port is taken."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    return listener, f"{scheme}{host}:{listener.getsockname()[1]}"


def listen_unix() -> tuple[socket.socket, str]:
    """The same under a name that nobody can have taken before."""
    name = f"moonserve-lean-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(_BACKLOG)
    return listener, UNIX + name


def tune(sock: socket.socket) -> None:
    """For low latency, and so that a vanished peer does not go unnoticed; does nothing to a Unix socket."""
    if sock.family == socket.AF_UNIX:
        return
    with suppress(OSError):  # the peer has hung up already, which the next read tells
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _VANISHED_S // 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _VANISHED_S // 2 // _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED_S * 1000)
