"""The port of the HTTP endpoint, before anybody listens on it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from deploy.config import ServeConfig
from protocol.errors import ConfigError


@contextlib.contextmanager
def held_port(config: ServeConfig) -> Iterator[int]:
    """The port for the gateways. Where several share it, it is kept for them while the block lasts, so that one that is
    restarted finds it; what is held does not listen and gets no connection. Raises ConfigError when it is in use."""
    with _socket(config) as probe:
        # Alone, also where others would share it: they are another cluster's.
        _bind(probe, config.host, config.port)
        if config.gateways == 1:
            port = config.port
            probe.close()
            yield port
            return
        port = probe.getsockname()[1]
    with _socket(config) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(holder, config.host, port)
        yield port


def _socket(config: ServeConfig) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def _bind(made: socket.socket, host: str, port: int) -> None:
    try:
        made.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; "
            "stop what uses it or choose another with --port"
        ) from error
