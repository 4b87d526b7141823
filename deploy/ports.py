"""TCP ports before a process listens on them: that of the HTTP endpoint, and those of servers that start again."""

from __future__ import annotations

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

from protocol.errors import ConfigError

FIRST_PORT = 10_000
_FIRST_EPHEMERAL = 32_768  # Linux's default
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPort:
    """`listener`: descriptor of the bound socket on which the only gateway and its successors listen, so that
    connections wait between two of them; None: each of several gateways has a socket of its own."""

    number: int
    listener: int | None


@contextlib.contextmanager
def held_port(host: str, port: int, *, shared: bool) -> Iterator[HeldPort]:
    """The port for the gateways, kept for them while the block lasts. Until one listens, nobody can connect. Where
    several gateways share it, the socket that holds it never listens and gets no connection. Raises ConfigError when it
    is in use."""
    with _socket(host) as alone:
        # Alone, also where gateways share it: others that listen there belong to another cluster.
        _bind(alone, host, port)
        number = alone.getsockname()[1]
        if not shared:
            yield HeldPort(number=number, listener=alone.fileno())
            return
    with _socket(host) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(holder, host, number)
        yield HeldPort(number=number, listener=None)


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
    """The first of `count` neighbouring TCP ports of the loopback interface that are this process's until it ends.

    No connection gets them while no server listens there, since they lie below those that the kernel gives away; no
    other caller gets them, since they are locked in a file that all processes of this user share. Raises OSError.
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


_taken: set[int] = set()  # locks of one process do not exclude each other


def _last() -> int:
    with contextlib.suppress(OSError, ValueError):
        first_ephemeral = int(_EPHEMERAL.read_text().split()[0])
        if first_ephemeral > FIRST_PORT + 1000:
            return first_ephemeral - 1
    return _FIRST_EPHEMERAL - 1


@functools.cache
def _lock_fd() -> int:
    """Open until the process ends."""
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
