"""`make bench-store`: measures the store's speed and cost; prints one table per part and writes JSON.

Parts: speed (against Mooncake Store, Redis and memcpy), disk (against fio), restart, hits (eviction policies on a
trace), blocks, nodes and directory (growth of cost). The exit status is 1 if a bar is missed or a part fails.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import write_json
from benchmarks.store.contestants import CONTESTANTS, Contestant
from benchmarks.store.parts import PARTS, Options, run
from benchmarks.store.report import bars_report
from benchmarks.store.workload import SIZES
from benchmarks.transfer.pair import Placement

QUICK_SIZES = ("64 KiB", "32×64 KiB", "1 MiB", "16 MiB")
QUICK_GIB, QUICK_REQUESTS = 1.0, 200
SAMPLE_S, QUICK_SAMPLE_S = 0.2, 0.06
ROUNDS, QUICK_ROUNDS = 5, 3
REQUESTS = 3_000
TRACE = Path(os.environ.get("MOONSERVE_TRACE", "../shared/traces/conversation_trace.jsonl"))


def main() -> int:
    arguments = _arguments()
    options = _options(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"machine": _machine(), "rounds": options.rounds, "bars": []}
    for name in arguments.only or _parts(quick=options.quick):
        part = run(name, options)
        document[name] = part.figures
        document["bars"] += part.bars
        print(f"## {part.title}\n\n{part.table}\n", flush=True)
        write_json(arguments.json, document)  # a later failure must not lose these figures
    print(bars_report(document["bars"]))
    return 0 if _good(document) else 1


def _good(document: Mapping[str, Any]) -> bool:
    met = all(bar["met"] is not False for bar in document["bars"])
    return met and not any("failed" in document[name] for name in PARTS if name in document)


def _parts(*, quick: bool) -> list[str]:
    """Returns the default parts. A quick run omits the disk, which takes a minute and says little."""
    return [name for name in PARTS if not (quick and name == "disk")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="3 minutes, no claims, no disk")
    parser.add_argument("--full", action="store_true", help="also 10⁷ blocks, minutes more")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}; at least 5 for a claim")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES))
    parser.add_argument("--contestants", type=_beginning, nargs="+", help="how names begin")
    parser.add_argument("--placement", type=Placement, choices=list(Placement), default=Placement.APART)
    parser.add_argument("--gib", type=float, help="on disk at the restart; default 20 or half")
    parser.add_argument("--folder", type=Path, default=Path("out"), help="on the disk of disk and restart")
    parser.add_argument("--trace", type=Path, default=TRACE, help="a Mooncake trace")
    parser.add_argument("--json", type=Path, default=Path("out/store.json"))
    parser.add_argument("--plots", type=Path, help="folder for PNG files")
    return parser.parse_args()


def _options(arguments: argparse.Namespace) -> Options:
    quick: bool = arguments.quick
    return Options(
        quick=quick,
        full=arguments.full,
        rounds=arguments.rounds or (QUICK_ROUNDS if quick else ROUNDS),
        min_s=QUICK_SAMPLE_S if quick else SAMPLE_S,
        sizes=arguments.sizes or (QUICK_SIZES if quick else list(SIZES)),
        contestants=list(itertools.chain(*arguments.contestants or ())) or CONTESTANTS,
        placement=arguments.placement,
        gib=QUICK_GIB if quick and arguments.gib is None else arguments.gib,
        folder=arguments.folder,
        trace=arguments.trace,
        requests=QUICK_REQUESTS if quick else REQUESTS,
        plots=arguments.plots,
    )


def _beginning(text: str) -> list[Contestant]:
    chosen = [each for each in CONTESTANTS if each.name.startswith(text)]
    if not chosen:
        names = ", ".join(each.name for each in CONTESTANTS)
        raise argparse.ArgumentTypeError(f"nobody of {names}")
    return chosen


def _machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
