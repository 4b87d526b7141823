"""`make bench-transfer`: compares moonserve with the machine's limits and other engines in one table.

Every contestant consists of two processes, initiator and target. All take turns; figures are medians over the rounds.
All moved bytes are compared once. The exit status is 1 if a bar is missed.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import ForeignLoad, machine, write_json
from benchmarks.transfer import contest
from benchmarks.transfer.contest import Placement
from benchmarks.transfer.contestant import ASYNC_OR_SYNC, Contestant
from benchmarks.transfer.contestants import iperf, raw_sockets
from benchmarks.transfer.report import OPS, bars, figures_of, report
from benchmarks.transfer.workload import LATENCY, POOL_BYTES, SIZES, Load, throughput

MODULES = "benchmarks.transfer.contestants."

MOONSERVE = tuple(
    Contestant(
        name=f"moonserve {transport}{' + checksums' if checksums else ''}",
        group="moonserve",
        module=MODULES + "moonserve:",
        options={"transport": transport, "checksums": checksums},
        modes=ASYNC_OR_SYNC,
    )
    for transport in ("shm", "tcp")
    for checksums in (False, True)
)
CONTESTANTS = (
    *MOONSERVE,
    Contestant(name="memcpy", group="limit", module=MODULES + "memory_copy:Copy", options={"huge": False}),
    Contestant(
        name="memcpy huge pages",
        group="limit",
        module=MODULES + "memory_copy:Copy",
        options={"huge": True},
    ),
    Contestant(name="process_vm_readv", group="limit", module=MODULES + "memory_copy:Vm"),
    Contestant(name="raw sockets", group="limit", module=MODULES + "raw_sockets:", modes=raw_sockets.MODES),
    Contestant(
        name="iperf3",
        group="limit",
        module=MODULES + "iperf:",
        largest_block=iperf.LARGEST_BLOCK,
        scatter=False,
        latency=False,
        verified=False,
    ),
    Contestant(
        name="mooncake tcp",
        group="peer",
        module=MODULES + "mooncake:",
        environment={"MC_LOG_LEVEL": "ERROR"},
        modes=ASYNC_OR_SYNC,
        in_peers_environment=True,
    ),
    Contestant(
        name="nixl tcp",
        group="peer",
        module=MODULES + "nixl:",
        options={"error_handling": "peer"},
        environment={"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"},
        in_peers_environment=True,
    ),
    Contestant(
        name="nixl shm",
        group="peer",
        module=MODULES + "nixl:",
        options={"error_handling": "none"},
        environment={"UCX_TLS": "sm,self"},
        in_peers_environment=True,
    ),
    Contestant(
        name="gloo",
        group="peer",
        module=MODULES + "gloo:",
        environment={"GLOO_SOCKET_IFNAME": "lo"},
    ),
)


PEERS_PYTHON = Path(".venv-bench/bin/python")
QUICK_SIZES = ("64 KiB", "1 MiB", "16 MiB")
SAMPLE_S, QUICK_SAMPLE_S = 0.15, 0.06
ROUNDS, QUICK_ROUNDS = 5, 3


def main() -> int:
    arguments = _arguments()
    loads = [throughput(op, *SIZES[size]) for size in arguments.sizes for op in OPS] + [LATENCY]
    document = _measured(arguments, loads)
    print(report(document))
    write_json(arguments.json, document)
    return 0 if all(bar["met"] is not False for bar in document["bars"]) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="1 to 2 minutes: fewer sizes, 3 rounds")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}; at least 5 for a claim")
    parser.add_argument("--sizes", type=_names(SIZES), help=f"of {', '.join(SIZES)}")
    parser.add_argument("--only", type=_contestants, help="names, or how they begin; by commas")
    parser.add_argument("--placement", type=Placement, choices=list(Placement), default=Placement.APART)
    parser.add_argument("--json", type=Path, default=Path("out/transfer.json"))
    arguments = parser.parse_args()
    arguments.sizes = arguments.sizes or list(QUICK_SIZES if arguments.quick else SIZES)
    arguments.rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    arguments.only = arguments.only or list(CONTESTANTS)
    return arguments


def _names(known: dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        by_key = {name.replace(" ", ""): name for name in known}
        keys = [key.strip().replace(" ", "") for key in text.split(",")]
        if unknown := set(keys) - set(by_key):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
        return [by_key[key] for key in keys]

    return parse


def _contestants(text: str) -> list[Contestant]:
    starts = tuple(part.strip() for part in text.split(","))
    chosen = [contestant for contestant in CONTESTANTS if contestant.name.startswith(starts)]
    if not chosen:
        names = ", ".join(contestant.name for contestant in CONTESTANTS)
        raise argparse.ArgumentTypeError(f"nobody of {names}")
    return chosen


def _measured(arguments: argparse.Namespace, loads: Sequence[Load]) -> dict[str, Any]:
    quiet = ForeignLoad()
    sample_s = QUICK_SAMPLE_S if arguments.quick else SAMPLE_S
    with (
        tempfile.TemporaryDirectory() as log_dir,
        contest.open_entrants(arguments.only, _python, Path(log_dir), arguments.placement) as seats,
    ):
        contest.verify(seats, loads)
        contest.measure(seats, loads, rounds=arguments.rounds, min_s=sample_s)
        results = {seat.contestant.name: figures_of(seat.result, arguments.sizes) for seat in seats}
    return {
        "machine": machine(),
        "others_cores": quiet.others_cores(),
        "rounds": arguments.rounds,
        "placement": arguments.placement,
        "pool_bytes": POOL_BYTES,
        "in_flight": {size: _in_flight(size) for size in arguments.sizes},
        "results": results,
        "bars": bars(results, arguments.sizes),
    }


def _in_flight(size: str) -> int:
    load = throughput("read", *SIZES[size])
    return load.requests * load.outstanding


def _python(contestant: Contestant) -> Path:
    return PEERS_PYTHON if contestant.in_peers_environment else Path(sys.executable)


if __name__ == "__main__":
    sys.exit(main())
