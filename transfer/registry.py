"""Every transport by its name, which is what `transports=` selects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from protocol.errors import ConfigError
from transfer.base import Transport
from transfer.shm.transport import ShmTransport
from transfer.tcp.transport import TcpTransport


def _rdma() -> Transport:
    from transfer.rdma.transport import RdmaTransport  # needs pyverbs, an extra

    return RdmaTransport()


_TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "shm": ShmTransport,
    "rdma": _rdma,
    "tcp": TcpTransport,
}


def make(names: Sequence[str]) -> tuple[Transport, ...]:
    """In order of preference. Raises ConfigError for a name that is unknown, missing or repeated."""
    unknown = [name for name in names if name not in _TRANSPORTS]
    if unknown or not names or len(set(names)) != len(names):
        raise ConfigError(f"transports {', '.join(names)!r}: choose from {', '.join(_TRANSPORTS)}")
    return tuple(_TRANSPORTS[name]() for name in names)
