"""The port of the HTTP endpoint, before anybody listens on it and while gateways come and go."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.config import ServeConfig
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPort:
    """`listener`: descriptor of the bound socket on which the only gateway and its successors listen, so that
    connections wait between two of them; None: each of several gateways has a socket of its own."""

    number: int
    listener: int | None


@contextlib.contextmanager
def held_port(config: ServeConfig) -> Iterator[HeldPort]:
    """The port for the gateways, kept for them while the block lasts. Until one listens, nobody can connect; what is
    held where several share it never listens and gets no connection. Raises ConfigError when it is in use."""
    with _socket(config) as alone:
        # Alone, also where others would share it: they are another cluster's.
        _bind(alone, config.host, config.port)
        number = alone.getsockname()[1]
        if config.gateways == 1:
            yield HeldPort(number=number, listener=alone.fileno())
            return
    with _socket(config) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(holder, config.host, number)
        yield HeldPort(number=number, listener=None)


def _socket(config: ServeConfig) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def _bind(made: socket.socket, host: str, port: int) -> None:
    try:
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; "
            "stop what uses it or choose another with --port"
        ) from error
