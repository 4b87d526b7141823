"""Compares RDMA from Python with perftest's C programs on the same device, in the same run.

`python -m benchmarks.transfer.rdma [--rail rxe0:1]` on a machine with a device, or in the guest:
`python -m tests.rdma.guest -- python -m benchmarks.transfer.rdma`. For each size, ib_read_bw or ib_write_bw and an
engine with its peer in another process run in turn; figures are medians of `--rounds`.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from moonserve.transfer import Op, RemoteSegment, ScatterTransfer, Segment, TransferEngine, TransferOptions
from moonserve.transfer.rdma.device import choose_ports, discover_ports

SIZES = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
TOKEN = "benchmark"
_AVERAGE = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", re.MULTILINE)
_PROGRAMS = {Op.READ: "ib_read_bw", Op.WRITE: "ib_write_bw"}


def options(rail: str, *, checksums: bool) -> TransferOptions:
    return TransferOptions(transports=("rdma",), rails=(rail,), checksums=checksums)


def serve(rail: str, nbytes: int) -> None:
    """Runs the peer: prints the location of its memory, and serves until stdin ends."""
    with TransferEngine(cluster_token=TOKEN, options=options(rail, checksums=False)) as engine:
        segment = engine.allocate(nbytes, readable=True)
        window_id = engine.open_window(segment, [(0, nbytes)])
        print(json.dumps([engine.address, segment.segment_id, window_id]), flush=True)
        sys.stdin.read()


@contextmanager
def peer(rail: str, nbytes: int) -> Iterator[tuple[RemoteSegment, int]]:
    command = [sys.executable, "-m", "benchmarks.transfer.rdma", "--rail", rail]
    process = subprocess.Popen(
        [*command, "--serve", str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    address, segment_id, window_id = json.loads(process.stdout.readline())
    try:
        yield RemoteSegment(address, segment_id), window_id
    finally:
        process.communicate()


class Ours:
    """An engine that moves `total` bytes per measurement as one list of pieces.

    All pieces are the same memory, as in perftest, which has one buffer of the size of a message.
    """

    def __init__(self, engine: TransferEngine, local: Segment, remote: RemoteSegment, window_id: int) -> None:
        self.engine, self.local, self.remote = engine, local, remote
        self.window_id = window_id

    def bytes_per_s(self, op: Op, size: int, total: int) -> float:
        rows = np.array([(0, 0, size)] * max(1, total // size), dtype=np.int64)
        window_id = self.window_id if op is Op.WRITE else None
        transfer = ScatterTransfer(op, self.local, self.remote, rows, window_id)
        start = time.perf_counter()
        self.engine.run([transfer], deadline_s=120)
        return size * len(rows) / (time.perf_counter() - start)


def perftest_bytes_per_s(op: Op, rail: str, size: int, total: int) -> float:
    """Returns perftest's bandwidth. Its unit "MB/s" means MiB/s."""
    port = choose_ports(discover_ports(), [rail])[0]
    assert port.gid is not None
    command = [_PROGRAMS[op], "-d", port.device, "-i", str(port.number), "-x", str(port.gid.index)]
    command += ["-s", str(size), "-n", str(max(5, total // size)), "-F"]
    for _ in range(5):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            while server.poll() is None:
                client = subprocess.run([*command, port.gid.ip], capture_output=True, text=True)
                found = _AVERAGE.search(client.stdout)
                if found is not None and float(found[1]):  # perftest prints 0 if its clock is unreliable
                    server.wait()
                    return float(found[1]) * (1 << 20)
                time.sleep(0.2)  # the server does not listen yet
    raise RuntimeError(f"{command[0]} says {client.stdout}{client.stderr}")


def measure(rail: str, arguments: argparse.Namespace) -> None:
    sizes, rounds, total = arguments.sizes, arguments.rounds, arguments.total
    nbytes = max(sizes)
    chosen = options(rail, checksums=arguments.checksums)
    with (
        TransferEngine(cluster_token=TOKEN, options=chosen) as engine,
        peer(rail, nbytes) as (remote, window_id),
    ):
        ours = Ours(engine, engine.allocate(nbytes), remote, window_id)
        print(f"{'':5} {'bytes':>9} {'perftest':>9} {'ours':>9}  MB/s, ratio", flush=True)
        for op in Op:
            ours.bytes_per_s(op, sizes[0], sizes[0])  # connects
            for size in sizes:
                pairs = [
                    (
                        perftest_bytes_per_s(op, rail, size, total),
                        ours.bytes_per_s(op, size, total),
                    )
                    for _ in range(rounds)
                ]
                report(op, size, pairs)


def report(op: Op, size: int, pairs: list[tuple[float, float]]) -> None:
    theirs, mine = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(ours / reference for reference, ours in pairs)
    print(f"{op:5} {size:9} {theirs / 1e6:9.1f} {mine / 1e6:9.1f}  {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rail", help="device port; the first usable one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--total", type=int, default=64 << 20, help="bytes per measurement")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--checksums", action="store_true")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rail = arguments.rail or choose_ports(discover_ports(), ())[0].name
    if arguments.serve:
        serve(rail, arguments.serve)
        return
    measure(rail, arguments)


if __name__ == "__main__":
    main()
