"""Paths and choosers as tests want them."""

from __future__ import annotations

from transfer.address import Rail
from transfer.rails.health import RailHealth
from transfer.rails.paths import Path, PathChooser
from transfer.rails.topology import Topology

MIB = 1 << 20
HERE = "cpu:0"


def path(
    transport: str = "tcp",
    rail: str = "eth0",
    *,
    remote: str = "",
    stream: int = 0,
    bandwidth: float | None = None,
) -> Path:
    remote = remote or rail
    return Path(
        transport,
        Rail(transport, rail, f"{rail}-here", bandwidth_bytes_s=bandwidth),
        Rail(transport, remote, f"{remote}-there"),
        stream,
    )


def chooser(
    *paths: Path,
    topology: Topology | None = None,
    health: RailHealth | None = None,
    **options: float,
) -> PathChooser:
    return PathChooser(paths, topology or Topology(), health or RailHealth(), **options)


def break_down(paths: PathChooser, broken: Path, now: float) -> float:
    """Three incidents: the path rests from the returned time on."""
    for number in range(3):
        paths.sent(broken, MIB)
        paths.failed(broken, MIB, now + number)
    return now + 2


def carry(paths: PathChooser, way: Path, now: float, seconds: float, times: int = 1) -> float:
    """Sends slices one after the other; returns when the last one has arrived."""
    for _ in range(times):
        paths.sent(way, MIB)
        now += seconds
        paths.done(way, MIB, seconds, now)
    return now
