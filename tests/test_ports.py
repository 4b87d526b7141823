"""Ports for servers that start again."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.ports import free_port

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_no_port_is_given_twice_in_a_row_and_none_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        given = [free_port() for _ in range(500)]
        assert taken.getsockname()[1] not in given
    assert len(set(given)) == len(given)


def test_the_kernel_gives_none_of_them_to_connections() -> None:
    first = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    assert max(free_port() for _ in range(1_000)) < first
