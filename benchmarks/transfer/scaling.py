"""Measures how moonserve's cost per byte depends on the number of peers, of concurrent batches and of rails.

One initiator moves batches of 4 × 64 KiB over the same 128 MiB. Peers: two batches are in flight per peer. Batches:
this many are in flight to one peer. Rails: loopback addresses. A series is flat if a GB at its last point costs at most
`FLAT` times the CPU seconds of its cheapest point.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.measure import table, write_json
from benchmarks.transfer import contest, contestant
from benchmarks.transfer.contest import Placement
from benchmarks.transfer.contestant import Contestant
from benchmarks.transfer.contestants import moonserve
from benchmarks.transfer.contestants.moonserve import DEADLINE_S, Transfers
from benchmarks.transfer.report import OPS, summarise
from benchmarks.transfer.workload import KIB, LOCAL, POOL_BYTES, REMOTE, Bytes, Load, Offsets
from moonserve.transfer import Batch, Op, RemoteSegment, Transfer

# moonserve with many peers, many batches or several rails: the contestants of `scaling`.
#
# The target process has `peers` engines that divide the pool's size, so that the amount of memory and the cache
# effects do not depend on their number. Each batch goes to one peer; batches go to the peers in turn.


def engine_options(options: dict[str, Any]) -> dict[str, Any]:
    addresses = [f"127.0.0.{number + 1}" for number in range(options["rails"])]
    more = {"rails": addresses} if options["rails"] > 1 else {}
    return {"transport": options["transport"], "checksums": options["checksums"], "more": more}


class Target(contestant.Target):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._engines = [moonserve.engine(engine_options(options)) for _ in range(options["peers"])]
        share = POOL_BYTES // len(self._engines)
        self._segments = [engine.allocate(share, readable=True) for engine in self._engines]
        self._windows = [
            engine.open_window(segment, [(0, share)])
            for engine, segment in zip(self._engines, self._segments, strict=True)
        ]

    def hello(self) -> dict[str, Any]:
        return {
            "peers": [
                (engine.address, segment.segment_id, window)
                for engine, segment, window in zip(self._engines, self._segments, self._windows, strict=True)
            ]
        }

    def fill(self, source: Bytes) -> None:
        for segment, part in zip(self._segments, np.split(source, len(self._segments)), strict=True):
            segment.buffer[:] = part.data

    def landed(self) -> Bytes:
        return np.concatenate([np.frombuffer(segment.buffer, np.uint8) for segment in self._segments])


class Initiator(contestant.Initiator):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._engine = moonserve.engine(engine_options(options))
        self._segment = self._engine.allocate(POOL_BYTES)
        self.pool = np.frombuffer(self._segment.buffer, np.uint8)

    def connect(self, other: dict[str, Any]) -> None:
        self._peers = [
            (RemoteSegment(address, segment_id), window_id) for address, segment_id, window_id in other["peers"]
        ]
        self._share = POOL_BYTES // len(self._peers)

    def prepare(self, load: Load, mode: str) -> None:
        self.load, self.mode = load, mode
        self.outstanding = self.options["outstanding"]
        batches = by_peer(np.concatenate(load.batches()), self._share, load.requests)
        self.batches = [self.prepared(batch) for batch in batches]

    def prepared(self, batch: Offsets) -> Transfers:
        remote, window_id = self._peers[int(batch[0, 0, REMOTE]) // self._share]
        return [
            Transfer(
                op=Op(self.load.op),
                local=self._segment,
                local_offset=local,
                remote=remote,
                remote_offset=there % self._share,
                length=self.load.block_bytes,
                window_id=window_id if self.load.op == "write" else None,
            )
            for there, local in batch[:, 0, [REMOTE, LOCAL]].tolist()
        ]

    def post(self, batch: Transfers) -> Batch:
        return self._engine.submit(batch, deadline_s=DEADLINE_S)

    def wait(self, posted: Batch) -> None:
        posted.wait()


def by_peer(requests: Offsets, share: int, per_batch: int) -> Offsets:
    """Groups the requests of a sweep into batches of one peer each, with the peers in turn."""
    peers = POOL_BYTES // share
    order = np.argsort(requests[:, 0, REMOTE] // share, kind="stable")
    batches = requests[order].reshape(peers, -1, per_batch, *requests.shape[1:])
    return batches.swapaxes(0, 1).reshape(-1, per_batch, *requests.shape[1:])


BLOCK_BYTES, REQUESTS = 64 * KIB, 4
COUNTS = {
    "peers": (1, 2, 4, 8, 16, 32, 64),
    "batches": (1, 4, 16, 64, 256),
    "rails": (1, 2, 3, 4),
}
DEFAULT_BATCHES = 8
FLAT = 1.3
SAMPLE_S = 0.15

Point = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer.scaling",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--checksums", action="store_true")
    parser.add_argument("--only", choices=list(COUNTS), help="one dimension")
    parser.add_argument("--placement", type=Placement, choices=list(Placement), default=Placement.APART)
    parser.add_argument("--json", type=Path, default=Path("out/transfer-scaling.json"))
    parser.add_argument("--plot", type=Path, help="a PNG file of the table")
    arguments = parser.parse_args()
    points = [
        point
        for dimension in ([arguments.only] if arguments.only else COUNTS)
        for transport in ("shm", "tcp")
        if (dimension, transport) != ("rails", "shm")
        for point in _series(dimension, transport, arguments)
    ]
    series = _flatness(points)
    print(_report(points, series))
    write_json(arguments.json, {"points": points, "series": series})
    if arguments.plot:
        _plot(points, arguments.plot)
    return 0 if all(each["met"] for each in series) else 1


def _series(dimension: str, transport: str, arguments: argparse.Namespace) -> list[Point]:
    """Measures all points of one series, in turns."""
    contestants = [_contestant(dimension, count, transport, arguments.checksums) for count in COUNTS[dimension]]
    loads = [Load(op, BLOCK_BYTES, requests=REQUESTS) for op in OPS]
    with (
        tempfile.TemporaryDirectory() as log_dir,
        contest.open_entrants(contestants, lambda _: Path(sys.executable), Path(log_dir), arguments.placement) as seats,
    ):
        contest.verify(seats, loads)
        contest.measure(seats, loads, rounds=arguments.rounds, min_s=SAMPLE_S)
        return [
            _point(dimension, transport, count, load, seat)
            for count, seat in zip(COUNTS[dimension], seats, strict=True)
            for load in loads
        ]


def _contestant(dimension: str, count: int, transport: str, checksums: bool) -> Contestant:
    shape = {"peers": 1, "rails": 1, "outstanding": DEFAULT_BATCHES}
    if dimension == "peers":
        shape |= {"peers": count, "outstanding": 2 * count}
    elif dimension == "batches":
        shape |= {"outstanding": count}
    else:
        shape |= {"rails": count}
    return Contestant(
        name=f"{transport} {dimension} {count}",
        group="moonserve",
        module="benchmarks.transfer.scaling:",
        options={"transport": transport, "checksums": checksums, **shape},
    )


def _point(dimension: str, transport: str, count: int, load: Load, seat: contest.Entrant) -> Point:
    samples = seat.result.samples.get((load, ""))
    failure = seat.result.absent or seat.result.errors.get(load)
    where = {"dimension": dimension, "transport": transport, "count": count, "op": load.op}
    if failure or not samples:
        return where | {"failed": failure or "no samples"}
    return where | summarise(samples)


def _flatness(points: Sequence[Point]) -> list[dict[str, Any]]:
    lines: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        lines.setdefault((point["dimension"], point["transport"], point["op"]), []).append(point)
    series = []
    for (dimension, transport, op), line in lines.items():
        costs = [point["cpu_s_per_gb"] for point in line if "failed" not in point]
        growth = costs[-1] / min(costs) if len(costs) == len(line) else None
        name = f"{transport} {op}, 1 … {line[-1]['count']} {dimension}"
        met = growth is not None and growth <= FLAT
        series.append({"series": name, "growth": growth, "met": met})
    return series


def _report(points: Sequence[Point], series: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            f"{point['count']} {point['dimension']}",
            f"{point['transport']} {point['op']}",
            point.get("failed") or f"{point['gb_s']:.2f}",
            "" if "failed" in point else f"{point['cpu_s_per_gb']:.3f}",
        ]
        for point in points
    ]
    lines = [
        [
            each["series"],
            f"{each['growth']:.2f}",
            f"≤ {FLAT}",
            "met" if each["met"] else "**missed**",
        ]
        for each in series
    ]
    return "\n\n".join(
        [
            table(("", "", "GB/s", "CPU s/GB"), rows),
            table(("CPU s/GB at the far end / at the cheapest point", "reached", "asked", ""), lines),
        ]
    )


def _plot(points: Sequence[Point], path: Path) -> None:
    from matplotlib import pyplot

    dimensions = list(dict.fromkeys(point["dimension"] for point in points))
    figure, panels = pyplot.subplots(2, len(dimensions), figsize=(4 * len(dimensions), 5), sharex="col", squeeze=False)
    for column, dimension in enumerate(dimensions):
        here = [p for p in points if p["dimension"] == dimension and "failed" not in p]
        for panel, figure_name in zip(panels[:, column], ("gb_s", "cpu_s_per_gb"), strict=True):
            _draw(panel, here, figure_name)
        panels[1, column].set_xlabel(dimension)
        panels[1, column].set_xscale("log", base=2)
        panels[1, column].set_xticks(COUNTS[dimension], labels=map(str, COUNTS[dimension]))
    panels[0, 0].set_ylabel("GB/s")
    panels[1, 0].set_ylabel("CPU seconds per GB")
    panels[0, 0].legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def _draw(panel: Any, points: Sequence[Point], figure: str) -> None:
    for number, (transport, op) in enumerate(itertools.product(("shm", "tcp"), OPS)):
        line = [p for p in points if (p["transport"], p["op"]) == (transport, op)]
        values = [point[figure] for point in line]
        counts = [point["count"] for point in line]
        panel.plot(counts, values, marker="o", color=f"C{number}", label=f"{transport} {op}")
    panel.set_ylim(bottom=0)


if __name__ == "__main__":
    sys.exit(main())
