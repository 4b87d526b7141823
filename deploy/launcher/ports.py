"""Reserves TCP ports before a process listens on them: for the HTTP endpoint, and for servers that are restarted."""

import contextlib
import fcntl
import functools
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moonserve.protocol.errors import ConfigError

FIRST_PORT = 10_000
_FIRST_EPHEMERAL = 32_768  # Linux's default
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedPort:
    """A reserved port. `listener`: descriptor of the bound socket on which a single gateway and its successors listen,
    so that connections wait between two of them; None = each of several gateways has its own socket."""

    number: int
    listener: int | None


@contextlib.contextmanager
def reserve_port(host: str, port: int, *, shared: bool) -> Iterator[ReservedPort]:
    """Holds the port for the gateways for the duration of the block. Clients cannot connect until a gateway listens. If
    several gateways share the port, the socket that holds it never listens and gets no connection. Raises ConfigError
    if the port is in use."""
    with _socket(host) as alone:
        # First without SO_REUSEPORT, even if gateways share the port: present listeners belong to another cluster.
        _bind(alone, host, port)
        number = alone.getsockname()[1]
        if not shared:
            yield ReservedPort(number=number, listener=alone.fileno())
            return
    with _socket(host) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(holder, host, number)
        yield ReservedPort(number=number, listener=None)


def _socket(host: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def _bind(made: socket.socket, host: str, port: int) -> None:
    try:
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; stop what uses it or choose another with --port"
        ) from error


def free_port(count: int = 1) -> int:
    """Reserves `count` adjacent TCP ports of the loopback interface until this process ends, and returns the first.

    The kernel assigns none of them to a connection, because they lie below its ephemeral range. No other caller gets
    them, because they are locked in a file that all processes of this user share. Raises OSError if none is free.
    """
    span = _last() - FIRST_PORT + 2 - count
    begin = random.randrange(span)
    for step in range(span):
        first = FIRST_PORT + (begin + step) % span
        ports = range(first, first + count)
        if _taken.isdisjoint(ports) and all(_locks(port) and _is_free(port) for port in ports):
            _taken.update(ports)
            return first
    raise OSError("no port is free")


_taken: set[int] = set()  # file locks do not exclude their own process


def _last() -> int:
    with contextlib.suppress(OSError, ValueError):
        first_ephemeral = int(_EPHEMERAL.read_text().split()[0])
        if first_ephemeral > FIRST_PORT + 1000:
            return first_ephemeral - 1
    return _FIRST_EPHEMERAL - 1


@functools.cache
def _lock_fd() -> int:
    """Opens the lock file once; it stays open until the process ends."""
    path = Path(tempfile.gettempdir()) / f"moonserve-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _locks(port: int) -> bool:
    try:
        fcntl.lockf(_lock_fd(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    with _socket("127.0.0.1") as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
