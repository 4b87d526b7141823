"""Measures how much of a shaped link the tcp transport uses, by delay, loss, rate and number of connections.

The baseline is one plain TCP connection over the same link: its losses are due to the kernel and the link, not to us.
The processes at both ends of the link, on two hosts: `target` serves memory, `initiator` and `raw` load the link. Each
prints one JSON line. The target ends with its stdin.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import median, table
from benchmarks.networks.hosts import Link, Network, network
from moonserve.transfer import Op, RemoteSegment, Transfer, TransferEngine, TransferOptions

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
STREAMS = (1, None)
"""Connections: one, and as many as the engine chooses."""


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
    return [sys.executable, "-m", "benchmarks.networks.bandwidth", *map(str, arguments)]


def report(cases: Sequence[Case], seconds: float, rounds: int) -> str:
    headers = ["link", "plain connection"]
    headers += [f"{op}, {streams or 'default'}" for streams in STREAMS for op in ("WRITE", "READ")]
    return table(headers, list(rows(cases, seconds, rounds)))


def _number(streams: str) -> int | None:
    return None if streams == "None" else int(streams)


TOKEN = "networks"
POOL_BYTES = 64 << 20
BATCH_BYTES = 8 << 20
IN_FLIGHT = 4
"""Batches in flight at a time, as from a worker."""
DEADLINE_S = 120.0
RAW_PORT = 6000


def target(host: str, streams: str) -> None:
    """Offers a segment for reads and writes, and discards the data of raw connections."""
    options = TransferOptions(host=host, transports=("tcp",), streams=_number(streams))
    with (
        TransferEngine(cluster_token=TOKEN, options=options) as engine,
        socket.create_server((host, RAW_PORT)) as listener,
    ):
        segment = engine.allocate(POOL_BYTES, readable=True)
        window = engine.open_window(segment, [(0, POOL_BYTES)])
        threading.Thread(target=_discard, args=[listener], daemon=True).start()
        _print_json({"address": engine.address, "segment": segment.segment_id, "window": window})
        sys.stdin.read()


def initiator(host: str, streams: str, address: str, segment: str, window: str, op: str, seconds: str) -> None:
    """Keeps batches in flight for `seconds` and prints bytes per second; the start-up phase does not count."""
    options = TransferOptions(host=host, transports=("tcp",), streams=_number(streams))
    with TransferEngine(cluster_token=TOKEN, options=options) as engine:
        local = engine.allocate(POOL_BYTES)
        remote = RemoteSegment(address, int(segment))

        def one(number: int) -> Callable[[], None]:
            offset = number * BATCH_BYTES % POOL_BYTES
            transfer = Transfer(
                op=Op(op),
                local=local,
                local_offset=offset,
                remote=remote,
                remote_offset=offset,
                length=BATCH_BYTES,
                window_id=int(window) if op == "write" else None,
            )
            return engine.submit([transfer], deadline_s=DEADLINE_S).wait

        _print_json({"bytes_per_s": _steady(one, BATCH_BYTES, float(seconds))})


def raw(host: str, address: str, seconds: str) -> None:
    """Does the same over one plain connection, as the limit of the link and the kernel."""
    chunk = bytes(1 << 20)
    with socket.create_connection((address, RAW_PORT), source_address=(host, 0)) as sock:

        def one(_: int) -> Callable[[], None]:
            return lambda: sock.sendall(chunk)

        _print_json({"bytes_per_s": _steady(one, len(chunk), float(seconds))})


def _steady(begin: Callable[[int], Callable[[], None]], num_bytes: int, seconds: float) -> float:
    """Returns bytes per second after the first quarter of the time, in which the sender finds the link's rate. The time
    is measured between ends of batches, because a slow link completes few."""
    started_at = time.monotonic()
    waiting = deque(begin(number) for number in range(IN_FLIGHT))
    number, done = IN_FLIGHT, 0
    counted_at, ended_at = 0.0, started_at
    while ended_at < started_at + seconds or done == 0:
        waiting.popleft()()
        ended_at = time.monotonic()
        if counted_at:
            done += num_bytes
        elif ended_at > started_at + seconds / 4:
            counted_at = ended_at
        waiting.append(begin(number))
        number += 1
    rate = done / (ended_at - counted_at)
    for wait in waiting:
        wait()
    return rate


def _discard(listener: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    while True:
        sock, _ = listener.accept()
        with sock:
            while sock.recv_into(buffer):
                pass


def _print_json(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    ENDS: dict[str, Callable[..., None]] = {"target": target, "initiator": initiator, "raw": raw}
    ENDS[sys.argv[1]](*sys.argv[2:])
