"""Ports for servers that a test starts, kills and starts again under the same address.

They lie below those that the kernel gives to connections and to whoever binds port 0, so that nobody takes one
while its server is down. Each of the processes that run tests has a share of its own.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator

_FIRST = 10_000
_SHARE = 1_000
_NUM_SHARES = 20  # up to 30,000; Linux gives out ports from 32,768


def _share() -> Iterator[int]:
    """Again and again, begun anywhere: another run may be using the same share."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST + worker % _NUM_SHARES * _SHARE
    begin = random.randrange(_SHARE)
    return (first + number % _SHARE for number in itertools.count(begin))


_ports = _share()


def free_port() -> int:
    """One on loopback that this process has not given out for long."""
    for port in itertools.islice(_ports, _SHARE):
        with socket.socket() as probe:
            # As servers do: connections that have ended do not hold a port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")
