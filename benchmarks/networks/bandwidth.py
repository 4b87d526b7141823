"""Measures how much of a shaped link the tcp transport uses, by delay, loss, rate and number of connections.

The baseline is one plain TCP connection over the same link: its losses are due to the kernel and the link, not to us.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import median, table
from benchmarks.networks.hosts import Link, Network, network

_GBIT = 125e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    title: str
    link: Link
    """Link properties in both directions."""
    congestion_control: str | None = None
    """None: the machine's default. The only other choice in a namespace is reno (tcp_allowed_congestion_control)."""
    mtu: int = 1500


def _case(
    gbit: float,
    rtt_ms: float,
    loss: float = 0.0,
    congestion_control: str | None = None,
    mtu: int = 1500,
) -> Case:
    link = Link(delay_s=rtt_ms / 2000, loss=loss, bytes_per_s=gbit * _GBIT)
    rate = f"{gbit:g} Gbit" if gbit >= 1 else f"{gbit * 1000:g} Mbit"
    lossy = f", {loss:.0%} lost" if loss else ""
    title = f"{rate}, {rtt_ms:g} ms{lossy}, {congestion_control or _own_control()}"
    return Case(title=title, link=link, congestion_control=congestion_control, mtu=mtu)


def _own_control() -> str:
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


CASES = (
    _case(0.1, 20),
    _case(1, 20),
    _case(1, 20, congestion_control="reno"),
    _case(1, 1),
    _case(10, 1, mtu=9000),
    _case(1, 20, 0.01),
    _case(1, 20, 0.01, "reno"),
    _case(1, 20, 0.05),
)
STREAMS = (1, 4)


def rows(cases: Sequence[Case], seconds: float, rounds: int) -> Iterator[list[Any]]:
    """Yields per case the shares of the link's rate: of a plain connection, then of WRITE and READ by connections."""
    for case in cases:
        with network(2, mtu=case.mtu, congestion_control=case.congestion_control) as net:
            for host in (0, 1):
                net.shape(host, case.link)
            shares = [value / case.link.bytes_per_s for value in _measured(net, seconds, rounds)]
        row = [case.title, *(f"{share:.2f}" for share in shares)]
        print(*row, file=sys.stderr, flush=True)
        yield row


def _measured(net: Network, seconds: float, rounds: int) -> Iterator[float]:
    """Yields bytes per second in the order of the table's columns; medians of rounds."""
    for number, streams in enumerate(STREAMS):
        serving = net.start(
            1,
            _command("target", net.address(1), streams),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            told = json.loads(serving.stdout.readline())  # type: ignore[union-attr]
            if number == 0:
                plain = ("raw", net.address(0), net.address(1), seconds)
                yield median([_run(net, *plain) for _ in range(rounds)])
            for op in ("write", "read"):
                arguments = (
                    *("initiator", net.address(0), streams),
                    *(told["address"], told["segment"], told["window"], op, seconds),
                )
                yield median([_run(net, *arguments) for _ in range(rounds)])
        finally:
            serving.communicate()


def _run(net: Network, *arguments: object) -> float:
    process = net.start(0, _command(*arguments), stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the measuring end failed: {arguments}")
    rate: float = json.loads(out)["bytes_per_s"]
    return rate


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "benchmarks.networks.ends", *map(str, arguments)]


def report(cases: Sequence[Case], seconds: float, rounds: int) -> str:
    headers = ["link", "plain connection"]
    headers += [f"{op}, {streams}" for streams in STREAMS for op in ("WRITE", "READ")]
    return table(headers, list(rows(cases, seconds, rounds)))
