"""`make bench-store`: measures the store's speed and cost; prints one table per part and writes JSON.

Parts: speed (against Mooncake Store, Redis and memcpy), disk (against fio), restart, hits (eviction policies on a
trace), blocks, nodes and directory (growth of cost). The exit status is 1 if a bar is missed or a part fails.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import machine, write_json
from benchmarks.store import growth_blocks, growth_nodes, restart
from benchmarks.store.report import (
    Bar,
    bars_report,
    blocks_report,
    disk_bars,
    hit_ratio_bars,
    metadata_bars,
    nodes_report,
    restart_report,
    speed_report,
)
from benchmarks.store.speed import contest
from benchmarks.store.speed.contestants import CONTESTANTS, Contestant
from benchmarks.store.speed.workload import SIZES
from benchmarks.transfer.contest import ContestantError, Placement

# Runs the parts of `make bench-store` by name. Each returns its figures, its table and its bars.
#
# A failed part reports the reason and does not affect the others. Parts that are separate benchmarks run in their own
# process; this module passes their options and reads their results.

OTHER_TIMEOUT_S = 1_200.0
QUICK_DISK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options from the command line."""

    quick: bool
    full: bool
    rounds: int
    min_s: float
    sizes: Sequence[str]
    contestants: Sequence[Contestant]
    placement: Placement
    gib: float | None
    folder: Path
    trace: Path
    requests: int
    plots: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    title: str
    figures: dict[str, Any]
    table: str
    bars: list[Bar] = field(default_factory=list)


def run_part(name: str, options: Options) -> Part:
    """Runs a part. An exception becomes the content of the returned part."""
    begin = time.monotonic()
    try:
        return PARTS[name](options)
    except Exception as error:  # the other parts keep their figures
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
        return Part(title=name, figures={"failed": why}, table=f"Failed: {why}")
    finally:
        print(f"· {name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def _speed(options: Options) -> Part:
    figures, bars = contest.measure_speed(
        options.contestants,
        options.sizes,
        rounds=options.rounds,
        min_s=options.min_s,
        placement=options.placement,
    )
    title = "Put, get and exists beside other stores"
    return Part(title=title, figures=figures, table=speed_report(figures), bars=bars)


def _disk(options: Options) -> Part:
    quick = ["--rounds", "1", "--bytes", str(QUICK_DISK_BYTES)]
    rounds = quick if options.quick else ["--rounds", str(options.rounds)]
    table, figures = _other("benchmarks.store.disk", *rounds, "--folder", str(options.folder))
    title = "The SSD tier beside fio"
    return Part(title=title, figures=figures, table=table, bars=disk_bars(figures))


def _restart(options: Options) -> Part:
    gib = restart.default_gib(options.folder) if options.gib is None else options.gib
    prompts = restart.read_prompts(options.trace, options.requests)
    figures, bars = restart.measure(options.folder, gib, prompts)
    return Part(title="Restart", figures=figures, table=restart_report(figures), bars=bars)


def _hits(options: Options) -> Part:
    if not options.trace.exists():
        raise FileNotFoundError(f"no trace at {options.trace} (moonserve traces fetch)")
    arguments = [str(options.trace)]
    if options.quick:  # too few requests to judge the bars
        arguments += ["--limit", "2000", "--capacities", "3000000"]
    if options.plots:
        arguments += ["--plot", str(options.plots / "store-hit-ratio.png")]
    table, figures = _other("benchmarks.store.hit_ratio", *arguments)
    bars = [] if options.quick else hit_ratio_bars(figures["points"])
    return Part(title="Hit ratio against capacity", figures=figures, table=table, bars=bars)


def _blocks(options: Options) -> Part:
    points = growth_blocks.measure(growth_blocks.chosen_points(quick=options.quick, full=options.full))
    title = "Growth with the blocks of one node"
    figures = {"points": points}
    return Part(title=title, figures=figures, table=blocks_report(points), bars=metadata_bars(points))


def _nodes(options: Options) -> Part:
    counts = growth_nodes.QUICK_COUNTS if options.quick else growth_nodes.COUNTS
    points = growth_nodes.measure(counts)
    title = "Growth with the nodes"
    return Part(title=title, figures={"points": points}, table=nodes_report(points))


def _directory(options: Options) -> Part:
    blocks = ["10000", "100000"] if options.quick else ["10000", "100000", "1000000"]
    blocks += ["10000000"] if options.full else []
    rounds = ["--rounds", str(options.rounds)]
    table, figures = _other("benchmarks.store.growth_directory", *rounds, "--blocks", *blocks)
    return Part(title="Growth of the directory", figures=figures, table=table)


PARTS: dict[str, Callable[[Options], Part]] = {
    "speed": _speed,
    "disk": _disk,
    "restart": _restart,
    "hits": _hits,
    "blocks": _blocks,
    "nodes": _nodes,
    "directory": _directory,
}


def _other(module: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Runs a separate benchmark; returns its table and its JSON. Missed bars do not count as a failed run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", module, *arguments, "--json", str(path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=OTHER_TIMEOUT_S)
        if not path.exists():
            raise ContestantError(f"{module} ended with {done.returncode} and no figures")
        figures: dict[str, Any] = json.loads(path.read_text())
        return done.stdout.strip(), figures


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
    document: dict[str, Any] = {"machine": machine(), "rounds": options.rounds, "bars": []}
    for name in arguments.only or _parts(quick=options.quick):
        part = run_part(name, options)
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


if __name__ == "__main__":
    sys.exit(main())
