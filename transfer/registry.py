"""Maps transport names, as given in `transports=`, to their implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from protocol.errors import ConfigError
from transfer.base import Transport
from transfer.shm.transport import ShmTransport
from transfer.tcp.transport import TcpTransport


def _rdma() -> Transport:
    from transfer.rdma.transport import RdmaTransport  # loaded only if selected

    return RdmaTransport()


_TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "shm": ShmTransport,
    "rdma": _rdma,
    "tcp": TcpTransport,
}


def make(names: Sequence[str]) -> tuple[Transport, ...]:
    """Creates the named transports, in order of preference. Raises ConfigError for no, unknown or repeated names."""
    unknown = [name for name in names if name not in _TRANSPORTS]
    if unknown or not names or len(set(names)) != len(names):
        raise ConfigError(f"transports {', '.join(names)!r}: choose from {', '.join(_TRANSPORTS)}")
    return tuple(_TRANSPORTS[name]() for name in names)
