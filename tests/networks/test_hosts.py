"""Simulated links have the configured delay, rate, loss and cuts, and their namespaces are removed at the end."""

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.networks.hosts import Link, Network, network
from tests.compilers import compile_strictly
from tests.patience import PATIENCE_S, until

PORT = 5000
PACKETS = 2_000


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network(3) as net:
        yield net
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert not [name for name in net.names if name in listed.stdout]


def bound(net: Network, host: int) -> socket.socket:
    """Returns a datagram socket in the host's namespace."""

    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        made.bind((net.address(host), PORT))
        made.settimeout(PATIENCE_S)
        return made

    return net.within(host, make)


@pytest.fixture
def sockets(net: Network) -> Iterator[list[socket.socket]]:
    made = [bound(net, host) for host in range(3)]
    yield made
    for each in made:
        each.close()
    for host in range(3):
        net.shape(host, Link())


def test_links_have_the_configured_delay_and_loss(net: Network, sockets: list[socket.socket]) -> None:
    there = (net.address(1), PORT)
    net.shape(0, Link(delay_s=0.05))
    sent_at = time.monotonic()
    sockets[0].sendto(b"late", there)
    assert sockets[1].recv(16) == b"late"
    assert time.monotonic() - sent_at >= 0.05
    net.shape(0, Link(bytes_per_s=1e6, queue_s=10))
    sent_at = time.monotonic()
    for _ in range(200):
        sockets[0].sendto(bytes(1_000), there)
    for _ in range(200):
        sockets[1].recv(2_000)
    assert time.monotonic() - sent_at >= 0.2
    net.shape(0, Link(bytes_per_s=1e5, queue_s=0.1))
    before = net.counts(0)
    for _ in range(100):
        sockets[0].sendto(bytes(1_000), there)
    until(lambda: net.counts(0).overflown > before.overflown)
    net.shape(0, Link(loss=0.05))
    before = net.counts(0)
    for _ in range(PACKETS):
        sockets[0].sendto(b"x", there)
    until(lambda: net.counts(0).sent - before.sent >= PACKETS)
    lost = net.counts(0).lost - before.lost
    assert 0.03 * PACKETS < lost < 0.08 * PACKETS  # over four standard deviations below, six above


def test_cuts_of_one_direction_and_of_a_host_heal(net: Network, sockets: list[socket.socket]) -> None:
    net.cut(0, 1)
    sockets[0].sendto(b"lost", (net.address(1), PORT))
    sockets[1].sendto(b"comes", (net.address(0), PORT))
    sockets[0].sendto(b"elsewhere", (net.address(2), PORT))
    assert sockets[0].recv(16) == b"comes"
    assert sockets[2].recv(16) == b"elsewhere"
    net.heal(0, 1)
    cut = [net.counts(host).cut for host in (0, 1)]
    net.isolate(1)
    sockets[0].sendto(b"lost", (net.address(1), PORT))
    sockets[1].sendto(b"lost", (net.address(2), PORT))
    until(lambda: net.counts(0).cut > cut[0] and net.counts(1).cut > cut[1])
    net.rejoin(1)
    sockets[0].sendto(b"again", (net.address(1), PORT))
    while (heard := sockets[1].recv(16)) != b"again":  # packets of an earlier test may still arrive
        assert heard != b"lost"


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_switch_compiles_without_a_warning(compiler: str, tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "benchmarks" / "networks" / "link_emulator.c"
    compile_strictly(compiler, source, ["-std=gnu11", "-fsyntax-only"], tmp_path)
